"""What is broken is found, named and passed over."""

import logging
import os
import shutil

import pytest
import torch

from tests.checkpoint.conftest import linear, resumed
from trainkit.checkpoint import Checkpointer, CheckpointError

NEWEST = "model_0000029.pth"


def warnings_of(caplog):
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return found


def test_after_each_damage_the_run_goes_on_from_the_checkpoint_before(run_folder, caplog):
    path = run_folder / NEWEST
    intact = path.read_bytes()
    assert resumed(run_folder) == 29
    assert warnings_of(caplog) == []
    flipped = intact.replace(
        torch.tensor(29.0).numpy().tobytes(), torch.tensor(28.0).numpy().tobytes()
    )
    for damaged in (
        flipped,
        intact[:-1],
        intact[: len(intact) // 2],
        b"",
        b"damaged",
        b"PK damaged",
    ):
        path.write_bytes(damaged)
        assert resumed(run_folder) == 19
        (warning,) = warnings_of(caplog)
        assert str(path) in warning
        assert f"Resuming from '{run_folder / 'model_0000019.pth'}' instead" in warning


@pytest.mark.parametrize(
    "make", [lambda path: path.mkdir(), lambda path: path.symlink_to(path), lambda path: None]
)
def test_a_tag_that_names_no_checkpoint_is_passed_over(run_folder, caplog, make):
    """Weights that somebody has put there are newer, but no state of a run."""
    torch.save({"model": linear(5).state_dict()}, run_folder / "weights.pth")
    for name in (".a.pth", "notes.txt"):  # no checkpoints
        (run_folder / name).touch()
    make(run_folder / "model_0000039.pth")
    (run_folder / "last_checkpoint").write_text("model_0000039.pth")
    assert resumed(run_folder) == 29
    (warning,) = warnings_of(caplog)
    assert "model_0000039.pth" in warning
    assert ".a.pth" not in warning
    assert "notes.txt" not in warning
    assert "weights.pth" not in warning


def test_no_intact_checkpoint_is_an_error_that_lists_all_and_without_a_run_there_is_none(
    run_folder,
):
    for path in run_folder.glob("*.pth"):
        path.write_bytes(b"PK damaged")
    tag = run_folder / "last_checkpoint"
    for change in (lambda: None, lambda: tag.write_text("\n"), tag.unlink):
        change()
        with pytest.raises(
            CheckpointError,
            match=r"no checkpoint is intact: .*0029.*0019.*0009.*leave out --resume",
        ):
            resumed(run_folder)
    (run_folder / "run_id").unlink()
    assert not Checkpointer(linear(0), run_folder).has_checkpoint()
    assert resumed(run_folder) == 0


def test_the_first_save_removes_what_a_killed_one_has_left_and_a_resume_nothing(run_folder):
    """A resume may read the folder of a run that is still writing."""
    leftover, mine = ".model_0000039.pth.trainkit-tmp", ".model_0000039.pth.mine"
    for name in (leftover, mine):
        (run_folder / name).touch()
    assert resumed(run_folder) == 29
    assert {leftover, mine} <= set(os.listdir(run_folder))

    checkpointer = Checkpointer(linear(39), run_folder)
    checkpointer.save("model_0000049")
    assert [name for name in os.listdir(run_folder) if name.startswith(".")] == [mine]
    shutil.rmtree(run_folder)
    with pytest.raises(CheckpointError, match="cannot write"):  # the folder is not made again
        checkpointer.save("model_0000059")
