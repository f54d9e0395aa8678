"""Processes of the training script that die or are stopped, and what the resumed ones end with."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.exactness.machine import content
from tests.tools.digits_run import OPTIONS as DIGITS
from tests.two_ranks import IMPORTED_ONCE
from tools import train_net
from trainkit.engine import default_argument_parser

ROOT = Path(__file__).resolve().parents[2]
# epochs of 12 iterations with random augmentation; periods without a common divisor
OPTIONS = [
    *DIGITS,
    "SOLVER.MAX_ITER",
    14,
    "SOLVER.IMS_PER_BATCH",
    100,
    "INPUT.TRAIN_TRANSFORM",
    "DigitsTrainTransform",
]
OPTIONS += ["SOLVER.CHECKPOINT_PERIOD", 3, "TEST.EVAL_PERIOD", 5, "LOG.PERIOD", 4, "LOG.WINDOW", 20]
OPTIONS += ["CHECKPOINT.BEST_METRIC", "classification/top1"]
ENDLESS = [
    "SOLVER.MAX_ITER",
    100_000,
    "SOLVER.CHECKPOINT_PERIOD",
    0,
    "TEST.EVAL_PERIOD",
    0,
    "STOP_CHECK_PERIOD",
    2,
]


def arguments(folder, *options, **send):
    """Those of a run that is sent a signal from inside."""
    hooks = (
        [{"NAME": "SendSignal", **{key.upper(): value for key, value in send.items()}}]
        if send
        else []
    )
    options = (*OPTIONS, "OUTPUT_DIR", folder, *options, "HOOKS", hooks)
    return [*map(str, options), "IMPORTS", "['projects.digits', 'tests.tools.digits_run']"]


@pytest.fixture(scope="module")
def start():
    """Processes that are forked from one which has imported everything, and so start in no time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)

    def start(folder, resume=False, num_workers=0, **send):
        """The exit code of a process that is sent a signal."""
        words = arguments(folder, "DATALOADER.NUM_WORKERS", num_workers, **send)
        process = context.Process(
            target=_train, args=([*(["--resume"] if resume else []), *words],)
        )
        process.start()
        process.join()
        return process.exitcode

    return start


def _train(arguments):
    # of loader workers: else they are forked from such a one too
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(1)
    train_net.main(default_argument_parser().parse_args(arguments))


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """What a run leaves that nothing has stopped."""
    folder = tmp_path_factory.mktemp("whole")
    assert start(folder) == 0
    return content(folder)


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_twice_inside_one_epoch_ends_as_the_whole_one(
    start, whole, tmp_path
):
    for iter, checkpoint, num_workers in (
        (4, "model_0000002.pth", 0),
        (10, "model_0000008.pth", 2),
    ):
        assert (
            start(tmp_path, resume=True, num_workers=num_workers, signum="SIGKILL", iter=iter) == -9
        )
        assert (tmp_path / "last_checkpoint").read_text().strip() == checkpoint
    assert start(tmp_path, resume=True, num_workers=1) == 0
    assert content(tmp_path) == whole
    assert "model_best.pth" in whole[0]


@pytest.mark.slow
@pytest.mark.parametrize(("iter", "in_evaluation"), [(6, False), (9, True)])
def test_a_run_that_sigterm_has_stopped_goes_on_as_if_nothing_had_happened(
    start, whole, tmp_path, iter, in_evaluation
):
    assert start(tmp_path, signum="SIGTERM", iter=iter, in_evaluation=in_evaluation) == 143
    assert max(row["iteration"] for row in content(tmp_path)[1]) <= iter
    assert start(tmp_path, resume=True) == 0
    files, lines = content(tmp_path)
    assert files.pop(f"model_{iter:07d}.pth")  # of the stop
    assert files == whole[0]
    assert lines == whole[1]


@pytest.fixture
def stop(tmp_path):
    """Run a command that is sent a signal: (its exit code, its standard error, the iteration of its checkpoint)."""
    # what a process in the background starts would ignore SIGINT as well
    former = signal.signal(signal.SIGINT, signal.default_int_handler)

    def stop(command, *options, **send):
        command = [sys.executable, *command, *arguments(tmp_path, *options, **send)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, env=environ
        )
        checkpoint = torch.load(tmp_path / (tmp_path / "last_checkpoint").read_text().strip())
        return done.returncode, done.stderr, checkpoint["iteration"]

    yield stop
    signal.signal(signal.SIGINT, former)


@pytest.mark.slow
def test_ctrl_c_ends_the_process_after_the_step_with_its_code_and_a_checkpoint(stop, tmp_path):
    code, error, iteration = stop(["tools/train_net.py"], signum="SIGINT", iter=5)
    assert code == 130
    assert "Traceback" not in error
    assert iteration == 5
    log = (tmp_path / "log.txt").read_text()
    assert "Rank 0 was asked to stop: SIGINT" in log
    assert "Stopped after 6 of 14 iterations: SIGINT" in log


TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "tools/train_net.py",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "signum"),
    [(["tools/train_net.py", "--num-gpus", "2"], "SIGINT"), (TORCHRUN, "SIGTERM")],
)
def test_a_signal_to_the_launcher_stops_all_ranks_with_a_checkpoint(
    stop, tmp_path, command, signum
):
    code, error, iteration = stop(command, *ENDLESS, signum=signum, iter=5, to_launcher=True)
    if signum == "SIGINT":
        assert code == 130
        assert "Traceback" not in error
    else:
        assert code == 1  # that of torchrun
    assert 5 <= iteration < 99_999
    for log in ("log.txt", "log.txt.rank1"):
        assert (
            f"Stopped after {iteration + 1} of 100000 iterations: SIGTERM"
            in (tmp_path / log).read_text()
        )
