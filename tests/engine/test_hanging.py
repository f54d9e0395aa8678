"""A run that is asked to stop and reaches no step boundary ends by itself, without a new checkpoint."""

import subprocess
import sys

import pytest

JOB = """
import signal, sys, threading
import torch
from torch import nn
from trainkit.checkpoint import Checkpointer
from trainkit.engine import SimpleTrainer, hooks, stopping

stopping._PATIENCE_SEC, stopping._ONE_SIGNAL_SEC = 0.3, 0.0
case, folder = sys.argv[1:]

def hang():
    threading.Event().wait()

def ask():
    signal.raise_signal(signal.SIGTERM)

class Data(list):
    def __iter__(self):
        for i in range(100):
            if i == 3 and case == "data":
                ask(), hang()
            yield torch.ones(2, 1)

class Model(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()

def after_step(trainer):
    if trainer.iter == 3:
        if case == "evaluator":
            ask(), hang()
        if case == "twice":
            stopping._PATIENCE_SEC = 600.0
            ask(), ask(), hang()
        if case == "slow save":  # the step ends sooner than the patience, also on a busy machine, and the save does not
            stopping._PATIENCE_SEC = 3.0
            ask()

model = Model(1, 1)
trainer = SimpleTrainer(model, Data(), torch.optim.SGD(model.parameters(), 0.1))
checkpointer = Checkpointer(model, folder, trainer=trainer)
write = checkpointer.save
checkpointer.save = lambda *args, **kwargs: (threading.Event().wait(4.0), write(*args, **kwargs))[1]
trainer.register_hooks([hooks.PeriodicCheckpointer(checkpointer, 0)])
trainer.register_hooks([hooks.CallbackHook(after_step=after_step)], priority="LOW")
trainer.train(0, 90)
"""


HANGS = "no step has ended for 0 s: its data, an evaluator or a writer may hang"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "reason"),
    [("data", HANGS), ("evaluator", HANGS), ("twice", "a second signal came"), ("slow save", "")],
)
def test_a_run_that_hangs_ends_as_by_the_signal_and_one_that_saves_does_not(case, reason, tmp_path):
    command = [sys.executable, "-c", JOB, case, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    files = sorted(path.name for path in tmp_path.glob("*.pth"))
    assert done.returncode == 143
    assert files == ([] if reason else ["model_0000003.pth"])
    if reason:
        assert f"without a new checkpoint, {reason}; " in done.stderr
        assert "--resume" in done.stderr
    else:
        assert "without a new checkpoint" not in done.stderr
