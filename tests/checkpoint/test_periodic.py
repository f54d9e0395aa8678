import errno
import logging
import os

import pytest
from fvcore.common import checkpoint as fvcore_checkpoint

from tests.checkpoint.conftest import linear
from trainkit.checkpoint import Checkpointer, PeriodicCheckpointer


def files(folder):
    names = {*os.listdir(folder)} - {"last_checkpoint", "run_id"}
    return sorted(name.removesuffix(".pth") for name in names)


def run(folder, iterations, checkpointer=None, **kwargs):
    periodic = PeriodicCheckpointer(checkpointer or Checkpointer(linear(0), folder), **kwargs)
    for iteration in iterations:
        periodic.step(iteration)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # model_0000005 would be the same as model_final
        ({"period": 2, "max_iter": 6}, ["model_0000001", "model_0000003", "model_final"]),
        ({"period": 2}, ["model_0000001", "model_0000003", "model_0000005"]),
        ({"period": 0, "max_iter": 6}, ["model_final"]),
        (
            {"period": 2, "max_iter": 6, "save_last": False},
            ["model_0000001", "model_0000003", "model_0000005"],
        ),
        # the period counts from there
        (
            {"period": 2, "start": 3},
            ["model_0000002", "model_0000004"],
        ),
        # as fvcore, the final file is kept beside max_to_keep numbered ones
        (
            {"period": 2, "max_iter": 6, "max_to_keep": 2},
            ["model_0000001", "model_0000003", "model_final"],
        ),
        ({"period": 1, "max_iter": 6, "max_to_keep": 1}, ["model_0000004", "model_final"]),
        (
            {"period": 2, "max_iter": 7, "max_to_keep": 2},
            ["model_0000003", "model_0000005", "model_final"],
        ),
        ({"period": 2, "max_iter": 6, "max_to_keep": 1, "save_last": False}, ["model_0000005"]),
    ],
)
def test_saves_each_period_and_once_at_the_end(tmp_path, arguments, expected):
    run(tmp_path, range(arguments.get("max_iter", 6)), **arguments)
    assert files(tmp_path) == expected
    assert (tmp_path / "last_checkpoint").read_text() == expected[-1] + ".pth"
    checkpointer = Checkpointer(linear(0), tmp_path)
    PeriodicCheckpointer(checkpointer, period=1, file_prefix="run").step(7, epoch=2)
    assert checkpointer.load(tmp_path / "run_0000007.pth") == {"iteration": 7, "epoch": 2}


@pytest.mark.parametrize(("period", "max_iter"), [(1, 6), (2, 9), (2, 10), (3, 13)])
@pytest.mark.parametrize("max_to_keep", [1, 2, 3])
def test_as_many_older_files_are_kept_as_by_fvcore(tmp_path, period, max_iter, max_to_keep):
    """fvcore writes a numbered file beside the final one if the period divides the run; here it is left out."""
    kept = {}
    for name, periodic, checkpointer in (
        ("ours", PeriodicCheckpointer, Checkpointer),
        ("fvcore", fvcore_checkpoint.PeriodicCheckpointer, fvcore_checkpoint.Checkpointer),
    ):
        (tmp_path / name).mkdir()
        hook = periodic(
            checkpointer(linear(0), str(tmp_path / name)), period, max_iter, max_to_keep=max_to_keep
        )
        for iteration in range(max_iter):
            hook.step(iteration)
        kept[name] = files(tmp_path / name)
    assert len(kept["ours"]) == len(kept["fvcore"])
    assert kept["ours"][-1] == kept["fvcore"][-1] == "model_final"


def test_rotation_goes_on_after_a_restart_and_leaves_final_best_and_other_files(tmp_path):
    kept = [
        "model_best",
        "model_final",
        "model_12",
        "model_0000000_copy",
        "other_0000000",
        "my_model_0000000",
    ]
    kept += ["model_10000099"]  # of a later iteration, from an earlier run
    for name in kept:
        (tmp_path / f"{name}.pth").touch()
    # of a run that was resumed in another format
    (tmp_path / "model_0000000.shards-0a1b2c3d").mkdir()
    run(tmp_path, range(3), period=1, max_to_keep=2)
    assert files(tmp_path) == sorted([*kept, "model_0000001", "model_0000002"])
    assert [*tmp_path.glob("*.shards-*")] == []
    run(tmp_path, [9_999_999, 10_000_000], period=1, max_to_keep=1)  # by number, not by name
    assert files(tmp_path) == sorted([*kept, "model_10000000"])


def test_nothing_is_removed_before_the_new_file_is_there_nor_by_who_does_not_write(tmp_path):
    class Late(Checkpointer):
        """An asynchronous save that has not ended."""

        def save(self, name, **kwargs):
            pass

    run(tmp_path, range(2), period=1)
    run(tmp_path, [2], Late(linear(0), tmp_path), period=1, max_to_keep=1)
    run(
        tmp_path,
        [2],
        Checkpointer(linear(0), tmp_path, save_to_disk=False),
        period=1,
        max_to_keep=1,
    )
    assert files(tmp_path) == ["model_0000000", "model_0000001"]


def test_a_folder_that_cannot_be_listed_gets_its_checkpoint_and_a_warning(
    tmp_path, monkeypatch, caplog, save_format
):
    def fail(folder):
        raise OSError(errno.ESTALE, "Stale file handle")

    checkpointer = Checkpointer(linear(0), tmp_path, format=save_format)
    with monkeypatch.context() as patches:
        patches.setattr(os, "listdir", fail)
        PeriodicCheckpointer(checkpointer, period=1, max_to_keep=1).step(0)
        checkpointer.wait()

    (warning,) = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert warning.endswith("Stale file handle")
    assert files(tmp_path) == ["model_0000000"]
