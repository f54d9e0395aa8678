"""Processes of the training script that a signal stops; what a stopped one goes on with is in test_resume.py."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tools.digits_run import MAX_ITER, OPTIONS, Run

ROOT = Path(__file__).resolve().parents[2]
SPAWNED = ["tools/train_net.py", "--num-gpus", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "tools/train_net.py"]
ENDLESS = ("SOLVER.MAX_ITER", 100_000, "SOLVER.CHECKPOINT_PERIOD", 0, "TEST.EVAL_PERIOD", 0, "STOP_CHECK_PERIOD", 2)


@pytest.fixture(autouse=True)
def interruptible():
    """What a process in the background starts would ignore SIGINT as well."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


def train(folder, *options, script=("tools/train_net.py",), **send):
    """A process of its own that is sent a signal: (its exit code, its standard error)."""
    hooks = [{"NAME": "SendSignal", **{key.upper(): value for key, value in send.items()}}] if send else []
    command = [
        *(sys.executable, *script, *map(str, OPTIONS), "OUTPUT_DIR", str(folder), *map(str, options)),
        *("IMPORTS", "['projects.digits', 'tests.tools.digits_signals']", "HOOKS", str(hooks)),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environ)
    return done.returncode, done.stderr


def last_checkpoint(folder):
    return torch.load(folder / (folder / "last_checkpoint").read_text().strip())


def test_ctrl_c_ends_the_process_behind_the_step_with_its_code_and_a_checkpoint(tmp_path):
    found, error = train(tmp_path, signum="SIGINT", iter=5)
    assert found == 130
    assert "Traceback" not in error
    assert "Rank 0 was asked to stop: SIGINT" in Run(tmp_path).log
    assert f"Stopped after 6 of {MAX_ITER} iterations: SIGINT" in Run(tmp_path).log
    assert last_checkpoint(tmp_path)["iteration"] == 5


@pytest.mark.slow
def test_ctrl_c_at_the_launcher_stops_all_ranks_with_a_checkpoint(tmp_path):
    found, error = train(tmp_path, *ENDLESS, script=SPAWNED, signum="SIGINT", iter=5, to_launcher=True)
    assert found == 130
    assert "Traceback" not in error
    stopped_at = last_checkpoint(tmp_path)["iteration"]
    assert 5 <= stopped_at < 99_999
    for log in ("log.txt", "log.txt.rank1"):
        assert f"Stopped after {stopped_at + 1} of 100000 iterations: SIGTERM" in (tmp_path / log).read_text()


@pytest.mark.slow
def test_sigterm_to_torchrun_leaves_a_checkpoint(tmp_path):
    found, _ = train(tmp_path, *ENDLESS, script=TORCHRUN, signum="SIGTERM", iter=5, to_launcher=True)
    assert found != 0  # torchrun has a code of its own
    stopped_at = last_checkpoint(tmp_path)["iteration"]
    assert 5 <= stopped_at < 99_999
    assert f"Stopped after {stopped_at + 1} of 100000 iterations: SIGTERM" in (tmp_path / "log.txt").read_text()
