"""Processes of the training script that die or are stopped inside an epoch, and what the resumed ones end with."""

import multiprocessing
import shutil

import pytest
import torch

from tests.exactness.machine import content
from tests.tools.digits_run import OPTIONS as DIGITS
from tests.two_ranks import IMPORTED_ONCE
from tools import train_net
from trainkit.checkpoint.file import write_file
from trainkit.engine import default_argument_parser

# epochs of 12 iterations with random augmentation; periods without a common divisor
OPTIONS = [*DIGITS, "SOLVER.MAX_ITER", 14, "SOLVER.IMS_PER_BATCH", 100, "INPUT.TRAIN_TRANSFORM", "DigitsTrainTransform"]
OPTIONS += ["SOLVER.CHECKPOINT_PERIOD", 3, "TEST.EVAL_PERIOD", 5, "LOG.PERIOD", 4, "LOG.WINDOW", 20]
OPTIONS += ["CHECKPOINT.BEST_METRIC", "classification/top1"]
OPTIONS += ["IMPORTS", ["projects.digits", "tests.tools.digits_signals"]]


@pytest.fixture(scope="module")
def start():
    """Processes that are forked from one which has imported everything, and so begin in no time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)

    def start(folder, *options, resume=False, num_workers=0, **send):
        """The exit code of a process that is sent a signal."""
        hooks = [{"NAME": "SendSignal", **{key.upper(): value for key, value in send.items()}}] if send else []
        options = (*OPTIONS, "OUTPUT_DIR", folder, "DATALOADER.NUM_WORKERS", num_workers, "HOOKS", hooks, *options)
        arguments = [*(["--resume"] if resume else []), *map(str, options)]
        process = context.Process(target=_train, args=(arguments,))
        process.start()
        process.join()
        return process.exitcode

    return start


def _train(arguments):
    multiprocessing.set_start_method(None, force=True)  # of loader workers: else they are forked from such a one too
    torch.set_num_threads(1)
    train_net.main(default_argument_parser().parse_args(arguments))


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """What a run leaves that nothing has stopped."""
    folder = tmp_path_factory.mktemp("whole")
    assert start(folder) == 0
    return content(folder)


@pytest.fixture(scope="module")
def killed(start, tmp_path_factory):
    """The folder of a run that has died in its iteration 4."""
    folder = tmp_path_factory.mktemp("killed")
    assert start(folder, signum="SIGKILL", iter=4) == -9
    assert (folder / "last_checkpoint").read_text().strip() == "model_0000002.pth"
    return folder


@pytest.mark.slow
def test_a_run_that_is_resumed_twice_inside_one_epoch_ends_as_the_whole_one(start, whole, killed, tmp_path):
    folder = shutil.copytree(killed, tmp_path / "run")
    assert start(folder, resume=True, num_workers=2, signum="SIGKILL", iter=10) == -9
    assert (folder / "last_checkpoint").read_text().strip() == "model_0000008.pth"
    assert start(folder, resume=True, num_workers=1) == 0
    assert content(folder) == whole
    assert "model_best.pth" in whole[0]


@pytest.mark.slow
@pytest.mark.parametrize(("iter", "in_evaluation"), [(6, False), (9, True)])
def test_a_run_that_sigterm_has_stopped_goes_on_as_if_nothing_had_happened(start, whole, tmp_path, iter, in_evaluation):
    assert start(tmp_path, signum="SIGTERM", iter=iter, in_evaluation=in_evaluation) == 143
    assert max(row["iteration"] for row in content(tmp_path)[1]) <= iter
    assert start(tmp_path, resume=True) == 0
    files, lines = content(tmp_path)
    assert files.pop(f"model_{iter:07d}.pth")  # of the stop
    assert (files, lines) == whole


@pytest.mark.slow
def test_a_run_that_misses_one_batch_of_its_data_ends_otherwise(start, whole, killed, tmp_path):
    folder = shutil.copytree(killed, tmp_path / "run")
    state = torch.load(folder / "model_0000002.pth")
    for place in (state["trainer"]["data"], state["trainer"]["data"]["order"]):
        assert place["position"] == 300
        place["position"] = 400
    write_file(state, folder / "model_0000002.pth")
    assert start(folder, resume=True) == 0
    (files, lines), (whole_files, whole_lines) = content(folder), whole
    assert files.keys() == whole_files.keys()
    assert (
        files["model_final.pth"]["/model/layers.0.weight"] != whole_files["model_final.pth"]["/model/layers.0.weight"]
    )
    assert lines != whole_lines
