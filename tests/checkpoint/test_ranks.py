"""Checkpoints of several processes."""

import errno
import os
from pathlib import Path

import pytest
from torch import distributed

from tests.checkpoint.conftest import Counter, linear, weight_of
from tests.two_ranks import on_two_ranks
from trainkit.checkpoint import Checkpointer, CheckpointError, checkpointer


def _main(rank: int, name: str) -> None:
    folder = Path(name)

    # Both save; rank 0 writes.
    Checkpointer(linear(rank + 1), folder / "run", trainer=Counter()).save("model")
    distributed.barrier()

    # Rank 1 finds no checkpoint in its own folder, but follows rank 0.
    model = linear(0)
    Checkpointer(model, folder / ("run" if rank == 0 else "empty"), trainer=Counter()).resume_or_load("")
    assert weight_of(model) == 1

    # Rank 1 does not see the file: nobody starts at 0, nobody waits.
    path = folder / "run" / "model.pth" if rank == 0 else folder / "elsewhere" / "model.pth"
    with pytest.raises(CheckpointError, match=r"rank 1: cannot read .*elsewhere"):
        Checkpointer(linear(0)).resume_or_load(path, resume=False)

    # Rank 0 writes and reads the note of the end, in its own folder; the other rank gets it.
    here = Checkpointer(linear(0), folder / ("run" if rank == 0 else "empty"))
    here.mark_finished({"rank": rank})
    assert here.finished() == {"rank": 0}
    here.forget_finished()
    assert here.finished() is None
    assert not (folder / "empty").exists()

    # An error of rank 0 in choosing the file reaches rank 1.
    if rank == 0:
        (folder / "run" / "last_checkpoint").write_text("../model.pth")
    with pytest.raises(CheckpointError, match="bare name"):
        Checkpointer(linear(0), folder / "run").resume_or_load("")

    # So does that of a disk.
    if rank == 0:
        (folder / "run" / "last_checkpoint").unlink()
        os.listdir = _fail
    with pytest.raises(CheckpointError, match="Stale file handle"):
        Checkpointer(linear(0), folder / "run").resume_or_load("")


def _fail(folder: str) -> list[str]:
    raise OSError(errno.ESTALE, "Stale file handle")


def test_all_ranks_load_the_same_file_or_fail_together(tmp_path):
    assert on_two_ranks([_main], tmp_path)["_main"] == [None, None]


def _one_does_not_see_the_mark(rank: int, name: str) -> str:
    folder = Path(name) / "mark"
    Checkpointer(linear(1), folder, trainer=Counter()).save("model")
    distributed.barrier()
    if rank == 0:
        (folder / "last_checkpoint").unlink()
    else:
        checkpointer.is_ours = lambda path: False
    model = linear(0)
    Checkpointer(model, folder, trainer=Counter()).resume_or_load("")
    return str(weight_of(model))


def test_all_ranks_take_the_file_that_rank_0_takes(tmp_path):
    assert on_two_ranks([_one_does_not_see_the_mark], tmp_path)["_one_does_not_see_the_mark"] == ["1.0", "1.0"]
