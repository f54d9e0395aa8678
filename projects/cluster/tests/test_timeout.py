"""A rank that hangs ends the run of the others after STEP_TIMEOUT."""

import logging
import os
import time

import pytest
from torch.nn.parallel import DistributedDataParallel
from trainkit.projects.cluster import timeout

from tests.engine.job import tiny_cfg
from tests.two_ranks import on_two_ranks
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import CallbackHook

FILES = os.environ.get("TORCH_FR_DUMP_TEMP_FILE", os.path.expanduser("~/.cache/torch/comm_lib_trace_rank_"))


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
    said, spy = [], logging.Handler()
    spy.emit = lambda record: said.append(record.getMessage())
    timeout.logger.setLevel(logging.INFO)
    timeout.logger.addHandler(spy)
    try:
        trainer.train()
    except RuntimeError:
        return trainer.iter, time.monotonic() - began[-1], said


@pytest.mark.slow
def test_the_first_step_may_take_longer_than_the_others(tmp_path):
    (iter, sec, said), _ = on_two_ranks([hang], tmp_path)["hang"]
    assert iter == 2
    assert 0.9 < sec < 3.5
    (line,) = said
    assert line.startswith("Ranks wait 1 s for each other from now on;")
    assert line.endswith(f"write their exchanges to {FILES}*")
