"""The batches of some iterations are left out, and all others are those of the plain run."""

import argparse
import contextlib
import logging

import pytest
import torch

from tests.engine.job import tiny_cfg
from tests.two_ranks import on_two_ranks
from trainkit.checkpoint.file import read_file
from trainkit.config import CfgNode, ConfigError, check_values
from trainkit.data import TRANSFORM_REGISTRY
from trainkit.engine import DefaultTrainer, HookBase, default_setup


@TRANSFORM_REGISTRY.register()
def AddNoise(cfg: CfgNode):
    """Its draws are equal for equal positions in the stream only."""
    return lambda sample: {**sample, "x": sample["x"] + torch.rand(4)}


class Killed(Exception):
    pass


class Seen(HookBase):
    """What the steps got, by iteration; stops the run after iteration ``last``, or kills it before ``killed_at``."""

    def __init__(self, last=None, killed_at=None):
        self.batches, self.last, self.killed_at = {}, last, killed_at

    def before_step(self):
        if self.trainer.iter == self.killed_at:
            raise Killed

    def after_backward(self):
        self.batches[self.trainer.iter] = self.trainer.batch["x"]

    def after_step(self):
        if self.trainer.iter == self.last:
            self.trainer.request_stop("enough")


def train(folder, *options, last=None, killed_at=None, resume=False):
    cfg = tiny_cfg(folder, "INPUT.TRAIN_TRANSFORM", "AddNoise", "TEST.EVAL_PERIOD", 0, "DATASETS.TEST", (), *options)
    cfg.freeze()
    default_setup(cfg, argparse.Namespace(resume=resume, eval_only=False))
    trainer, seen = DefaultTrainer(cfg), Seen(last, killed_at)
    trainer.register_hooks([seen])
    trainer.resume_or_load(resume)
    with contextlib.suppress(Killed):
        trainer.train()
    return trainer, seen


def same(found, plain, numbers):
    """Whether the batches found are those of these iterations of the plain run."""
    pairs = [(found[iter], plain[number]) for iter, number in sorted(numbers.items())]
    return sorted(found) == sorted(numbers) and all(torch.equal(*pair) for pair in pairs)


def left_out(folder, name="model_final"):
    return read_file(folder / f"{name}.pth")["trainer"]["hooks"]["SkipBatches"]["left_out"]


SKIP = ("DATALOADER.SKIP", [[3, 5], [6, 7]], "SOLVER.CHECKPOINT_PERIOD", 1)
# iteration -> iteration of the plain run whose batch it gets
SHIFTED = {0: 0, 1: 1, 2: 2, 3: 5, 4: 6, 5: 7, 6: 9, 7: 10, 8: 11, 9: 12}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    _, seen = train(tmp_path_factory.mktemp("plain"), "SOLVER.MAX_ITER", 13)
    return seen.batches


def test_an_iteration_gets_the_batch_after_those_that_are_left_out(tmp_path, plain, caplog):
    caplog.set_level(logging.INFO)
    _, seen = train(tmp_path, *SKIP)

    assert same(seen.batches, plain, SHIFTED)
    assert not same(seen.batches, plain, {i: i for i in range(10)})
    assert "the batches of iterations 3 to 4 are left out, and iteration 3 gets the next one" in caplog.text
    assert "the batches of iterations 6 to 6 are left out" in caplog.text
    assert left_out(tmp_path) == [[3, 5], [6, 7]]
    assert left_out(tmp_path, "model_0000004") == [[3, 5]]


def test_a_file_of_before_this_hook_still_says_what_was_left_out(tmp_path, plain):
    _, first = train(tmp_path, *SKIP, last=3)
    path = tmp_path / "model_0000003.pth"
    state = read_file(path)
    state["trainer"]["left_out"] = state["trainer"]["hooks"].pop("SkipBatches")["left_out"]
    torch.save(state, path)

    _, second = train(tmp_path, *SKIP, resume=True)

    assert max(first.batches) == 3
    assert same(first.batches | second.batches, plain, SHIFTED)


def test_a_range_behind_the_run_shifts_nothing_and_is_named(tmp_path, plain, caplog):
    train(tmp_path, last=6)

    _, seen = train(tmp_path, "DATALOADER.SKIP", [[2, 4], [8, 9]], resume=True)

    assert same(seen.batches, plain, {7: 7, 8: 9, 9: 10})
    assert "nothing of [2, 4] is left out, since the run continues with iteration 7" in caplog.text
    assert "nothing of [8, 9]" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [3, 7])
def test_a_run_with_workers_that_is_killed_and_resumed_leaves_out_the_same(tmp_path, plain, killed_at):
    options = (*SKIP, "DATALOADER.NUM_WORKERS", 2, "SOLVER.CHECKPOINT_PERIOD", 2)
    _, first = train(tmp_path, *options, killed_at=killed_at)
    _, second = train(tmp_path, *options, resume=True)

    assert min(second.batches) == killed_at // 2 * 2
    assert same(first.batches | second.batches, plain, SHIFTED)


def check_skip_of_a_rank(rank, folder):
    options = (*SKIP, "DATALOADER.NUM_WORKERS", 2)
    _, first = train(folder, *options, killed_at=4)
    _, second = train(folder, *options, resume=True)
    return first.batches | second.batches


@pytest.mark.slow
def test_two_processes_leave_out_the_same(tmp_path, plain):
    ranks = on_two_ranks([check_skip_of_a_rank], tmp_path)["check_skip_of_a_rank"]

    # sample p of the stream goes to rank p % 2
    found = {iter: torch.stack([batches[iter] for batches in ranks], 1).flatten(0, 1) for iter in ranks[0]}
    assert same(found, plain, SHIFTED)


@pytest.mark.parametrize("ranges", [[3, 5], [[3, 3]], [[-1, 3]], [[3, 5], [4, 7]]])
def test_bad_ranges_are_errors(tmp_path, ranges):
    with pytest.raises(ConfigError, match=r"DATALOADER.SKIP: got .* accepted: a list of \[start, end\]"):
        check_values(tiny_cfg(tmp_path, "DATALOADER.SKIP", ranges))
