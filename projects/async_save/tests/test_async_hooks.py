"""The hooks that save, with a checkpointer that saves in a thread."""

import pytest
from torch import nn

from tests.engine.hooks.test_checkpoint import (
    files,
    test_a_run_that_is_stopped_is_saved_where_it_stands_and_counts_in_the_rotation,
    test_a_run_whose_last_save_fails_has_failed,
)
from tests.engine.hooks.test_checkpoint_ranks import fail_on_rank_0
from tests.engine.tiny import AfterStep, Steps
from tests.two_ranks import on_two_ranks
from trainkit.checkpoint import Checkpointer
from trainkit.engine.hooks import PeriodicCheckpointer

__all__ = [
    "test_a_run_that_is_stopped_is_saved_where_it_stands_and_counts_in_the_rotation",
    "test_a_run_whose_last_save_fails_has_failed",
]


@pytest.fixture
def save_format():
    return "async_save"


def settled(checkpointer):
    """Looks at the folder, for which the checkpointer waits."""
    return AfterStep(lambda trainer: checkpointer.has_checkpoint())


def test_an_asynchronous_save_that_fails_is_logged_at_once_and_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "model_0000001.pth").mkdir()
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path, format="async_save")
    errors = []
    count = AfterStep(lambda trainer: errors.append(sum("is not saved" in text for text in caplog.messages)))
    trainer = Steps([settled(checkpointer), PeriodicCheckpointer(checkpointer, 2)])
    trainer.register_hooks([settled(checkpointer), count], priority="LOW")
    trainer.train(0, 6)

    assert trainer.status == "finished"
    assert errors == [0, 1, 1, 1, 1, 1]
    (error,) = [text for text in caplog.messages if "is not saved" in text]
    assert error.startswith("A checkpoint is not saved, training continues: cannot write")
    assert "model_0000001.pth" in error
    assert files(tmp_path) == ["last_checkpoint", "model_0000001.pth", "model_0000003.pth", "model_final.pth"]


def fail_asynchronously(rank, folder):
    return fail_on_rank_0(rank, folder, "async_save")


def test_a_failure_in_the_thread_of_rank_0_fails_all_ranks(tmp_path):
    assert on_two_ranks([fail_asynchronously], tmp_path)["fail_asynchronously"] == [None, None]
