"""What holds for every save, with one that a thread writes: full disks, killed processes, stopped and failed runs."""

import pytest

from tests.checkpoint.conftest import run_folder
from tests.checkpoint.test_disk import (
    file_size_limit,
    test_a_save_that_does_not_fit_leaves_the_one_before,
    test_wherever_a_disk_is_full_all_earlier_files_are_intact,
    test_wherever_a_save_is_killed_the_old_or_the_new_checkpoint_is_intact,
)
from tests.engine.hooks.test_checkpoint import (
    test_a_run_that_is_stopped_is_saved_where_it_stands_and_counts_in_the_rotation,
    test_a_run_whose_last_save_fails_has_failed,
)

__all__ = [
    "file_size_limit",
    "run_folder",
    "test_a_run_that_is_stopped_is_saved_where_it_stands_and_counts_in_the_rotation",
    "test_a_run_whose_last_save_fails_has_failed",
    "test_a_save_that_does_not_fit_leaves_the_one_before",
    "test_wherever_a_disk_is_full_all_earlier_files_are_intact",
    "test_wherever_a_save_is_killed_the_old_or_the_new_checkpoint_is_intact",
]


@pytest.fixture
def save_format():
    return "async_save"
