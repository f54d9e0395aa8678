"""Two processes, of which rank 0 writes; both end in the same way."""

from pathlib import Path

import pytest
from torch import nn

from tests.engine.tiny import AfterStep, Steps
from tests.two_ranks import on_two_ranks
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.engine.hooks import PeriodicCheckpointer


def fail_on_rank_0(rank, folder, save_format=""):
    """What rank 0 alone finds out fails both."""
    mine = Path(folder, f"{rank}{save_format}")
    folder = mine / "full"
    (folder / "model_final.pth").mkdir(parents=True)
    trainer = Steps(
        [PeriodicCheckpointer(Checkpointer(nn.Linear(1, 1), folder, format=save_format), 2)]
    )
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


@pytest.mark.slow
def test_all_ranks_fail_together_and_save_again_where_they_stop(tmp_path):
    assert on_two_ranks([fail_on_rank_0], tmp_path) == {"fail_on_rank_0": [None, None]}
