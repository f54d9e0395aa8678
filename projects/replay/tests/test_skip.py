"""The batches of some iterations are left out, and all others are those of the plain run."""

import contextlib

import pytest
import torch
from trainkit.projects.replay.tests.job import At, Keep, Killed, stop_at, train

from tests.engine.job import tiny_cfg
from tests.two_ranks import on_two_ranks
from trainkit.checkpoint.file import read_file
from trainkit.config import CfgNode, ConfigError, check_values, prepare_projects
from trainkit.data import TRANSFORM_REGISTRY


@TRANSFORM_REGISTRY.register()
def AddNoise(cfg: CfgNode):
    """Its draws are equal for equal positions in the stream only."""
    return lambda sample: {**sample, "x": sample["x"] + torch.rand(4)}


def batches(folder, *words, options=(), hooks=()):
    """What the steps of a run get, by iteration."""
    seen = Keep()
    own = (
        "INPUT.TRAIN_TRANSFORM",
        "AddNoise",
        "TEST.EVAL_PERIOD",
        0,
        "DATASETS.TEST",
        (),
        *options,
    )
    with contextlib.suppress(Killed):
        train(folder, *words, options=own, hooks=[seen, *hooks])
    return seen.xs


def same(found, plain, numbers):
    """Whether the batches found are those of these iterations of the plain run."""
    pairs = [(found[iter], plain[number]) for iter, number in sorted(numbers.items())]
    return sorted(found) == sorted(numbers) and all(torch.equal(*pair) for pair in pairs)


def log(folder):
    return (folder / "log.txt").read_text()


def left_out(folder, name="model_final"):
    return read_file(folder / f"{name}.pth")["trainer"]["hooks"]["SkipBatches"]["left_out"]


SKIP = ("DATALOADER.SKIP", [[3, 5], [6, 7]], "SOLVER.CHECKPOINT_PERIOD", 1)
# iteration -> iteration of the plain run whose batch it gets
SHIFTED = {0: 0, 1: 1, 2: 2, 3: 5, 4: 6, 5: 7, 6: 9, 7: 10, 8: 11, 9: 12}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return batches(tmp_path_factory.mktemp("plain"), options=("SOLVER.MAX_ITER", 13))


def test_an_iteration_gets_the_batch_after_those_that_are_left_out(tmp_path, plain):
    found = batches(tmp_path, options=SKIP)
    assert same(found, plain, SHIFTED)
    assert not same(found, plain, {i: i for i in range(10)})
    assert "iterations 3 to 4 are left out" in log(tmp_path)
    cfg = prepare_projects(tiny_cfg(tmp_path, *SKIP))
    assert len(prepare_projects(cfg).HOOKS) == len(cfg.HOOKS) == 1
    assert left_out(tmp_path) == [[3, 5], [6, 7]]
    assert left_out(tmp_path, "model_0000004") == [[3, 5]]


def test_a_range_behind_the_run_shifts_nothing_and_is_named(tmp_path, plain):
    batches(tmp_path, hooks=[stop_at(6)])
    found = batches(tmp_path, "--resume", options=("DATALOADER.SKIP", [[2, 4], [8, 9]]))
    assert same(found, plain, {7: 7, 8: 9, 9: 10})
    assert "nothing of [2, 4] is left out" in log(tmp_path)
    assert "continues with iteration 7" in log(tmp_path)
    assert "nothing of [8, 9]" not in log(tmp_path)


def check_skip_of_a_rank(rank, folder):
    options = (*SKIP, "DATALOADER.NUM_WORKERS", 2)
    return batches(folder, options=options, hooks=[At(4, Killed())]) | batches(
        folder, "--resume", options=options
    )


@pytest.mark.slow
def test_two_processes_with_workers_that_are_killed_and_resumed_leave_out_the_same(tmp_path, plain):
    ranks = on_two_ranks([check_skip_of_a_rank], tmp_path)["check_skip_of_a_rank"]
    # sample p of the stream goes to rank p % 2
    found = {iter: torch.stack([xs[iter] for xs in ranks], 1).flatten(0, 1) for iter in ranks[0]}
    assert same(found, plain, SHIFTED)


@pytest.mark.parametrize("ranges", [[3, 5], [[3, 3]], [[-1, 3]], [[3, 5], [4, 7]]])
def test_bad_ranges_are_errors(tmp_path, ranges):
    with pytest.raises(
        ConfigError, match=r"DATALOADER.SKIP: got .* accepted: a list of \[start, end\]"
    ):
        check_values(tiny_cfg(tmp_path, "DATALOADER.SKIP", ranges))
