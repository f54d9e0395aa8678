"""The note that a run has finished."""

import logging
import os

import pytest

from tests.checkpoint.conftest import linear
from trainkit.checkpoint import Checkpointer, CheckpointError

INFO = {"iterations": 5, "results": {"a/b": 0.5}}


def test_a_note_is_there_until_it_is_forgotten(tmp_path):
    checkpointer = Checkpointer(linear(1), tmp_path / "run")
    assert checkpointer.finished() is None
    checkpointer.forget_finished()
    checkpointer.mark_finished(INFO)
    assert Checkpointer(linear(0), tmp_path / "run").finished() == INFO
    checkpointer.mark_finished({"iterations": 6})
    assert checkpointer.finished() == {"iterations": 6}
    checkpointer.forget_finished()
    assert checkpointer.finished() is None
    assert os.listdir(tmp_path / "run") == []


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"iterations": 5', b"[" * 100_000, None])
def test_a_damaged_note_counts_as_none_with_a_warning(tmp_path, caplog, content):
    if content is None:
        (tmp_path / "finished").mkdir()
    else:
        (tmp_path / "finished").write_bytes(content)

    assert Checkpointer(linear(1), tmp_path).finished() is None
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"'{tmp_path / 'finished'}' is damaged and is ignored: " in warning


def test_without_a_folder_there_is_no_note():
    checkpointer = Checkpointer(linear(1), "")
    checkpointer.mark_finished(INFO)
    checkpointer.forget_finished()
    assert checkpointer.finished() is None


def test_a_note_that_cannot_be_removed_is_an_error(tmp_path):
    (tmp_path / "finished").mkdir()
    with pytest.raises(CheckpointError, match="cannot remove .*finished': "):
        Checkpointer(linear(1), tmp_path).forget_finished()
