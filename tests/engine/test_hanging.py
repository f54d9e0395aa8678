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
        if case == "slow save":
            ask()

model = Model(1, 1)
trainer = SimpleTrainer(model, Data(), torch.optim.SGD(model.parameters(), 0.1))
checkpointer = Checkpointer(model, folder, trainer=trainer)
write = checkpointer.save
checkpointer.save = lambda *args, **kwargs: (threading.Event().wait(1.0), write(*args, **kwargs))[1]
trainer.register_hooks([hooks.PeriodicCheckpointer(checkpointer, 0)])
trainer.register_hooks([hooks.CallbackHook(after_step=after_step)], priority="LOW")
trainer.train(0, 90)
"""


def run(case, tmp_path):
    command = [sys.executable, "-c", JOB, case, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done, sorted(path.name for path in tmp_path.glob("*.pth"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("data", "no step has ended for 0 s: its data, an evaluator or a writer may hang"),
        ("evaluator", "no step has ended for 0 s: its data, an evaluator or a writer may hang"),
        ("twice", "a second signal came"),
    ],
)
def test_a_run_that_hangs_ends_as_by_the_signal_and_says_why(case, reason, tmp_path):
    done, files = run(case, tmp_path)
    assert (done.returncode, files) == (143, [])
    assert f"The run ends without a new checkpoint, {reason}; --resume continues from the last one" in done.stderr


@pytest.mark.slow
def test_a_run_that_has_reached_a_step_boundary_has_all_the_time_to_save(tmp_path):
    done, files = run("slow save", tmp_path)
    assert (done.returncode, files) == (143, ["model_0000003.pth"])
    assert "without a new checkpoint" not in done.stderr
