"""A rank that hangs ends the run of the others after STEP_TIMEOUT."""

import logging
import os
import time

import pytest
from trainkit.projects.cluster import hooks

from tests.engine.job import tiny_cfg
from tests.two_ranks import on_two_ranks
from trainkit.engine import DefaultTrainer
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
    said, spy = [], logging.Handler()
    spy.emit = lambda record: said.append(record.getMessage())
    hooks.logger.setLevel(logging.INFO)
    hooks.logger.addHandler(spy)
    try:
        trainer.train()
    except RuntimeError:
        return trainer.iter, time.monotonic() - began[-1], *said


def in_the_third_step(rank, folder):
    return hang(rank, folder, {0: 1.5, 2: 4.0})


def in_the_first_step(rank, folder):
    return hang(rank, folder, {0: 4.0}, "FIRST_STEP_TIMEOUT", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "expected"), [(in_the_third_step, (2, 1800)), (in_the_first_step, (0, 1))]
)
def test_the_first_step_and_the_others_have_timeouts_of_their_own(check, expected, tmp_path):
    (iter, sec, line), _ = on_two_ranks([check], tmp_path)[check.__name__]
    assert 0.9 < sec < 3.5
    assert line.startswith(
        f"Ranks wait {expected[1]} s for each other in the first step, then 1 s;"
    )
    assert line.endswith(f"write their exchanges to {FILES}*")
    assert iter == expected[0]
