"""A rank that hangs ends the run of the others after STEP_TIMEOUT."""

import time

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests.engine.job import tiny_cfg
from tests.two_ranks import on_two_ranks
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import CallbackHook


def hang(rank, folder):
    """How long rank 0 waits for rank 1, which hangs in its first step and longer in its third."""
    trainer = DefaultTrainer(tiny_cfg(folder, "STEP_TIMEOUT", 1.0, "LOG.PERIOD", 10))
    assert isinstance(trainer.model, DistributedDataParallel)
    naps, began = {0: 1.5, 2: 4.0}, []

    def nap(trainer):
        began.append(time.monotonic())
        if rank == 1:
            time.sleep(naps.get(trainer.iter, 0))

    trainer.register_hooks([CallbackHook(before_step=nap)])
    try:
        trainer.train()
    except RuntimeError:
        return trainer.iter, time.monotonic() - began[-1]


@pytest.mark.slow
def test_the_first_step_may_take_longer_than_the_others(tmp_path):
    (iter, sec), _ = on_two_ranks([hang], tmp_path)["hang"]
    assert iter == 2
    assert 0.9 < sec < 3.5
