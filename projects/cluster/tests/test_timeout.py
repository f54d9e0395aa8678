"""A rank that hangs ends the run of the others after STEP_TIMEOUT."""

import contextlib
import logging
import os
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from trainkit.projects.cluster import hooks

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Weight, sgd
from tests.two_ranks import on_two_ranks
from trainkit.engine import DEFAULT_TIMEOUT, DefaultTrainer, SimpleTrainer, create_ddp_model
from trainkit.engine.hooks import CallbackHook

FILES = os.environ.get(
    "TORCH_FR_DUMP_TEMP_FILE", os.path.expanduser("~/.cache/torch/comm_lib_trace_rank_")
)


def hang(rank, folder, naps, *options):
    """In which step, and how long, rank 0 waits for rank 1, which sleeps before some steps."""
    trainer = DefaultTrainer(tiny_cfg(folder, "STEP_TIMEOUT", 1.0, "LOG.PERIOD", 10, *options))
    began = []

    def nap(trainer):
        began.append(time.monotonic())
        if rank == 1:
            time.sleep(naps.get(trainer.iter, 0))

    trainer.register_hooks([CallbackHook(before_step=nap)])
    with lines_of_hooks() as said, contextlib.suppress(RuntimeError):
        trainer.train()
    return trainer.iter, time.monotonic() - began[-1], *said


@contextlib.contextmanager
def lines_of_hooks():
    """What the hooks log inside; ranks have a second to answer."""
    hooks.ANSWER_SEC = 1.0
    said, spy = [], logging.Handler()
    spy.emit = lambda record: said.append(record.getMessage())
    hooks.logger.setLevel(logging.INFO)
    hooks.logger.addHandler(spy)
    try:
        yield said
    finally:
        hooks.logger.removeHandler(spy)


def named(rank, act, rank_of_act):
    """What a rank says of the others, after one of three has acted in the third step."""
    model = create_ddp_model(Weight())
    trainer = SimpleTrainer(model, [torch.ones(())], sgd(model), exchange_period=100)
    act_there = CallbackHook(
        before_step=lambda trainer: rank == rank_of_act and trainer.iter == 2 and act()
    )
    trainer.register_hooks([hooks.StepTimeout(1.0, first=1.0), act_there])
    with lines_of_hooks() as said, contextlib.suppress(RuntimeError, ZeroDivisionError):
        trainer.train(0, 5)
    return said[1:]


def rank_2_hangs(rank, folder):
    return named(rank, partial(time.sleep, 4.0), 2)


def rank_0_hangs(rank, folder):
    return named(rank, partial(time.sleep, 4.0), 0)


def rank_1_fails(rank, folder):
    return named(rank, lambda: 1 / 0, 1)


def assert_ranks_name(said_by_rank, others):
    for said in said_by_rank:
        [text] = said
        assert text.endswith(f": {others}")


@pytest.mark.slow
def test_the_log_names_the_rank_that_hangs_or_has_ended(tmp_path):
    found = on_two_ranks([rank_2_hangs, rank_0_hangs, rank_1_fails], tmp_path, num_ranks=3)
    assert_ranks_name(found["rank_2_hangs"][:2], "[2]")
    assert_ranks_name(found["rank_0_hangs"][1:], "[0]")
    first, failed, third = found["rank_1_fails"]
    assert_ranks_name([first, third], "[1]")
    assert failed == []  # it has an error of its own, and waits for nobody


def test_after_the_run_the_timeout_is_that_of_launch_again():
    def timeout():
        return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout

    seen = []
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=DEFAULT_TIMEOUT
    )
    try:
        model = Weight()
        trainer = SimpleTrainer(model, [torch.ones(())], sgd(model))
        look = CallbackHook(before_step=lambda trainer: seen.append(timeout()))
        trainer.register_hooks([hooks.StepTimeout(2.0, first=5.0), look])
        trainer.train(0, 3)
        assert seen == [timedelta(seconds=sec) for sec in (5, 2, 2)]
        assert timeout() == timedelta(minutes=30)
    finally:
        dist.destroy_process_group()


def in_the_third_step(rank, folder):
    return hang(rank, folder, {0: 1.5, 2: 4.0})


def in_the_first_step(rank, folder):
    return hang(rank, folder, {0: 4.0}, "FIRST_STEP_TIMEOUT", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "expected"), [(in_the_third_step, (2, 1800)), (in_the_first_step, (0, 1))]
)
def test_the_first_step_and_the_others_have_timeouts_of_their_own(check, expected, tmp_path):
    (iter, sec, line, _), _ = on_two_ranks([check], tmp_path)[check.__name__]
    assert 0.9 < sec < 3.5
    assert line.startswith(
        f"Ranks wait {expected[1]} s for each other in the first step, then 1 s;"
    )
    assert line.endswith(f"write their exchanges to {FILES}*")
    assert iter == expected[0]
