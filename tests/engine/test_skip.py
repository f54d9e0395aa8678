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
from trainkit.engine.skip import Skip


@TRANSFORM_REGISTRY.register()
def AddNoise(cfg: CfgNode):
    """Its draws are equal for equal positions in the stream only."""
    return lambda sample: {**sample, "x": sample["x"] + torch.rand(4)}


class Killed(Exception):
    pass


class Seen(HookBase):
    """What the steps got, by iteration; stops the run after iteration ``last``, or kills it before ``killed_at``."""

    def __init__(self, last=None, killed_at=None):
        self.batches, self.points, self.last, self.killed_at = {}, [], last, killed_at

    def before_step(self):
        self.points.append(("before_step", self.trainer.iter))
        if self.trainer.iter == self.killed_at:
            raise Killed

    def after_backward(self):
        batch = self.trainer.batch
        batches = batch if isinstance(batch, list) else [batch]
        self.batches[self.trainer.iter] = torch.cat([batch["x"] for batch in batches])

    def after_step(self):
        self.points.append(("after_step", self.trainer.iter, sorted(self.trainer.losses)))
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


SKIP = ("DATALOADER.SKIP", [[3, 5], [6, 7]], "SOLVER.CHECKPOINT_PERIOD", 1)
CONSUME = (*SKIP, "DATALOADER.SKIP_MODE", "consume")
# iteration -> iteration of the plain run whose batch it gets
SHIFTED = {0: 0, 1: 1, 2: 2, 3: 5, 4: 6, 5: 7, 6: 9, 7: 10, 8: 11, 9: 12}
CONSUMED = {0: 0, 1: 1, 2: 2, 5: 5, 7: 7, 8: 8, 9: 9}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    _, seen = train(tmp_path_factory.mktemp("plain"), "SOLVER.MAX_ITER", 13)
    return seen.batches


def test_an_iteration_gets_the_batch_after_those_that_are_left_out(tmp_path, plain, caplog):
    caplog.set_level(logging.INFO)
    trainer, seen = train(tmp_path, *SKIP)

    assert same(seen.batches, plain, SHIFTED)
    assert not same(seen.batches, plain, {i: i for i in range(10)})
    assert "the batches of iterations 3 to 4 are left out, and iteration 3 gets the next one" in caplog.text
    assert "the batches of iterations 6 to 6 are left out" in caplog.text
    assert trainer.state_dict()["left_out"] == [[3, 5], [6, 7]]
    assert read_file(tmp_path / "model_0000004.pth")["trainer"]["left_out"] == [[3, 5]]


def test_iterations_can_pass_without_a_step(tmp_path, plain, caplog):
    caplog.set_level(logging.INFO)
    _, seen = train(tmp_path, *CONSUME)

    assert same(seen.batches, plain, CONSUMED)
    assert [point for point in seen.points if point[1] in (2, 3)] == [
        ("before_step", 2),
        ("after_step", 2, ["loss_cls"]),
        ("before_step", 3),
        ("after_step", 3, []),
    ]
    before, after = (read_file(tmp_path / f"model_000000{iter}.pth") for iter in (2, 4))
    assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])
    assert after["trainer"]["hooks"]["LRScheduler"]["last_epoch"] == 5
    assert 3 not in after["trainer"]["storage"]["histories"]["total_loss"]["iterations"].tolist()
    assert caplog.text.count("the batches of iterations 3 to 4 are left out, which make no step") == 1


@pytest.mark.parametrize(("options", "numbers"), [(SKIP, SHIFTED), (CONSUME, CONSUMED)], ids=["shift", "consume"])
@pytest.mark.parametrize("last", [2, 3, 4, 6])
@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed_leaves_out_the_same(tmp_path, plain, options, numbers, last):
    _, first = train(tmp_path, *options, last=last)
    assert max(first.points)[1] == last

    _, second = train(tmp_path, *options, resume=True)

    assert same(first.batches | second.batches, plain, numbers)


def test_a_range_behind_the_run_shifts_nothing_and_is_named(tmp_path, plain, caplog):
    train(tmp_path, last=6)

    _, seen = train(tmp_path, "DATALOADER.SKIP", [[2, 4], [8, 9]], resume=True)

    assert same(seen.batches, plain, {7: 7, 8: 9, 9: 10})
    assert "nothing of [2, 4] is left out, since the run continues with iteration 7" in caplog.text
    assert "nothing of [8, 9]" not in caplog.text


@pytest.mark.slow
def test_of_a_range_that_the_run_has_reached_the_rest_is_left_out(tmp_path, plain):
    train(tmp_path, last=6)

    _, seen = train(tmp_path, "DATALOADER.SKIP", [[2, 9]], resume=True)

    assert same(seen.batches, plain, {7: 9, 8: 10, 9: 11})


@pytest.mark.slow
def test_a_skip_that_is_taken_away_afterwards_shifts_nothing(tmp_path, plain):
    train(tmp_path, *SKIP, last=6)

    _, seen = train(tmp_path, resume=True)

    assert same(seen.batches, plain, {iter: SHIFTED[iter] for iter in (7, 8, 9)})


@pytest.mark.slow
def test_a_second_run_of_a_trainer_leaves_out_again(tmp_path, plain):
    trainer, seen = train(tmp_path, *SKIP)
    seen.batches.clear()

    trainer.train(0, 5)  # the data go on where they stand

    assert trainer.state_dict()["left_out"] == [[3, 5]]


@pytest.mark.slow
def test_micro_batches_are_left_out_together(tmp_path):
    options = ("SOLVER.IMS_PER_BATCH", 4, "SOLVER.ACCUMULATION_STEPS", 2)
    _, plain = train(tmp_path / "plain", *options, "SOLVER.MAX_ITER", 13)

    _, seen = train(tmp_path / "skip", *options, *SKIP)

    assert same(seen.batches, plain.batches, SHIFTED)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "numbers"), [(SKIP, SHIFTED), (CONSUME, CONSUMED)], ids=["shift", "consume"])
@pytest.mark.parametrize("killed_at", [3, 4, 7])
def test_a_run_with_workers_that_is_killed_and_resumed_leaves_out_the_same(
    tmp_path, plain, options, numbers, killed_at
):
    options = (*options, "DATALOADER.NUM_WORKERS", 2, "SOLVER.CHECKPOINT_PERIOD", 2)
    _, first = train(tmp_path, *options, killed_at=killed_at)
    _, second = train(tmp_path, *options, resume=True)

    assert min(second.points)[1] == killed_at // 2 * 2
    assert same(first.batches | second.batches, plain, numbers)
    for iter in first.batches.keys() & second.batches.keys():
        assert torch.equal(first.batches[iter], second.batches[iter])


def check_skip_of_a_rank(rank, folder):
    return [run_of_a_rank(f"{folder}/shift", *SKIP), run_of_a_rank(f"{folder}/consume", *CONSUME)]


def run_of_a_rank(folder, *options):
    _, first = train(folder, *options, "DATALOADER.NUM_WORKERS", 2, killed_at=4)
    _, second = train(folder, *options, "DATALOADER.NUM_WORKERS", 2, resume=True)
    return first.batches | second.batches


@pytest.mark.slow
def test_two_processes_leave_out_the_same(tmp_path, plain):
    by_rank = on_two_ranks([check_skip_of_a_rank], tmp_path)["check_skip_of_a_rank"]

    for ranks, numbers in zip(zip(*by_rank, strict=True), [SHIFTED, CONSUMED], strict=True):
        # sample p of the stream goes to rank p % 2
        found = {iter: torch.stack([batches[iter] for batches in ranks], 1).flatten(0, 1) for iter in ranks[0]}
        assert same(found, plain, numbers)


@pytest.mark.parametrize(
    "ranges",
    [
        [3, 5],
        [[5, 3]],
        [[3, 3]],
        [[-1, 3]],
        [[3, 5, 7]],
        [[3, 5], [4, 7]],
        [[3, 5], [5, 7]],
        [["3", 5]],
        [[True, 5]],
        [[1.0, 2]],
    ],
)
def test_bad_ranges_are_errors(tmp_path, ranges):
    with pytest.raises(ConfigError, match=r"DATALOADER.SKIP: got .* accepted: a list of \[start, end\]"):
        check_values(tiny_cfg(tmp_path, "DATALOADER.SKIP", ranges))


def test_an_unknown_mode_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="DATALOADER.SKIP_MODE: got 'drop' .*; accepted: 'shift', 'consume'"):
        check_values(tiny_cfg(tmp_path, "DATALOADER.SKIP_MODE", "drop"))


def test_a_run_that_stops_while_a_batch_is_left_out_leaves_out_the_rest(tmp_path):
    """As when a signal comes while the loader waits: no update, and the batches before are gone."""
    skip = Skip(tiny_cfg(tmp_path, "DATALOADER.SKIP", [[3, 7]]))
    drawn = []

    class Trainer:
        def fetch(self):
            if len(drawn) == 2:
                raise InterruptedError
            drawn.append(None)

    with pytest.raises(InterruptedError):
        skip.leave_out(Trainer(), 3)
    assert skip.left_out == [[3, 5]]

    resumed = Skip(tiny_cfg(tmp_path, "DATALOADER.SKIP", [[3, 7]]))
    resumed.left_out = skip.left_out
    resumed.begin(3)
    drawn.clear()
    drawn.append(None)
    with pytest.raises(InterruptedError):
        resumed.leave_out(Trainer(), 3)
    assert resumed.left_out == [[3, 6]]
    drawn[:] = [None] * 3
    resumed.leave_out(Trainer(), 3)
    resumed.leave_out(Trainer(), 4)
    assert (len(drawn), resumed.left_out) == (4, [[3, 7]])
