"""Two processes: rank 0 has the results and writes; both end in the same way."""

import os
from pathlib import Path

import pytest
from torch import distributed, nn

from tests.engine.tiny import AfterStep, Steps
from tests.two_ranks import on_two_ranks
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.engine.hooks import (
    BestCheckpointer,
    EarlyStopping,
    EvalHook,
    PeriodicCheckpointer,
)
from trainkit.utils import comm


def _train(folder, values, **early):
    results = iter(values)
    checkpointer = Checkpointer(nn.Linear(1, 1), folder)
    trainer = Steps(
        [
            PeriodicCheckpointer(checkpointer, 2, max_to_keep=1),
            EvalHook(2, lambda: {"top1": next(results)} if comm.is_main_process() else None),
            BestCheckpointer(2, checkpointer, "top1"),
            EarlyStopping(2, "top1", **early),
        ]
    )
    trainer.train(0, 20)
    return trainer


def _main(rank, folder):
    mine = Path(folder, str(rank))

    for name, values, early, expected in (
        ("threshold", [1, 2, 3, 4], {"threshold": 2.5}, 6),
        ("patience", [1, 2, 1, 1, 5], {"patience": 2}, 8),
    ):
        trainer = _train(mine / name, values, **early)
        assert (trainer.status, trainer.iter, trainer.max_iter) == ("finished", expected, expected)
    # of three runs, what rank 0 alone has written
    assert mine.exists() == (rank == 0)
    distributed.barrier()


def fail_on_rank_0(rank, folder, save_format=""):
    """What rank 0 alone finds out fails both."""
    mine = Path(folder, f"{rank}{save_format}")
    folder = mine / "full"
    (folder / "model_final.pth").mkdir(parents=True)
    trainer = Steps([PeriodicCheckpointer(Checkpointer(nn.Linear(1, 1), folder, format=save_format), 2)])
    with pytest.raises(CheckpointError, match=r"cannot write .*model_final\.pth"):
        trainer.train(0, 3)
    assert trainer.status == "failed"

    # after the failed save of an iteration, all ranks save again when they stop there
    trainer = Steps()
    folder = mine / "stopped"
    checkpointer = Checkpointer(nn.Linear(1, 1), folder, format=save_format, trainer=trainer)
    if rank == 0:
        (folder / "model_0000001.pth").mkdir(parents=True)

    def make_room(trainer, checkpointer=checkpointer, folder=folder):
        checkpointer.has_checkpoint()  # waits
        if rank == 0 and trainer.iter == 1:
            (folder / "model_0000001.pth").rmdir()

    trainer.stop_check_period = 1
    stop = AfterStep(lambda trainer: trainer.iter == 1 and trainer.request_stop("enough"))
    trainer.register_hooks([stop, PeriodicCheckpointer(checkpointer, 2)])
    trainer.register_hooks([AfterStep(make_room)], priority="LOW")
    trainer.train(0, 9)
    assert trainer.status == "stopped"
    assert (folder / "model_0000001.pth").is_file() == (rank == 0)


def test_rank_0_writes_and_all_ranks_stop_or_fail_together(tmp_path):
    assert on_two_ranks([_main, fail_on_rank_0], tmp_path) == {"_main": [None, None], "fail_on_rank_0": [None, None]}

    names = sorted(os.listdir(tmp_path / "0" / "threshold"))
    assert names == ["last_checkpoint", "model_0000005.pth", "model_best.pth", "model_final.pth"]
