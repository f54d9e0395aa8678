"""Disks that are full, and processes that die while they write."""

import errno
import os
import resource
import signal

import pytest
import torch

from tests.checkpoint.conftest import Counter, linear, resumed
from tests.checkpoint.faults import CALLS_OF_A_SAVE, EACH_CALL, Faults
from tests.engine.tiny import AfterStep, Steps
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.engine.hooks import PeriodicCheckpointer


def save_and_wait(checkpointer, name):
    checkpointer.save(name)
    checkpointer.wait()


def hidden_files(folder):
    return [name for name in os.listdir(folder) if name.startswith(".")]


def test_wherever_a_disk_is_full_all_earlier_files_are_intact(run_folder, monkeypatch, save_format):
    def fail():
        raise OSError(errno.ENOSPC, "No space left on device")

    before = {path.name: path.read_bytes() for path in run_folder.glob("*.pth")}
    checkpointer = Checkpointer(linear(39), run_folder, format=save_format, trainer=Counter(39))
    for kind, n in EACH_CALL:
        with monkeypatch.context() as patch:
            Faults(patch.setattr, kind, n, fail)
            with pytest.raises(CheckpointError, match="cannot write .*: No space left on device"):
                save_and_wait(checkpointer, "model_0000039")

        assert hidden_files(run_folder) == []
        assert {name: (run_folder / name).read_bytes() for name in before} == before
        # there all but the tag's place in the folder is durable
        tagged = 39 if (kind, n) == ("fsync", 3) else 29
        assert (run_folder / "last_checkpoint").read_text() == f"model_{tagged:07d}.pth"
        assert resumed(run_folder) == tagged
        checkpointer.tag_last_checkpoint("model_0000029.pth")

    with monkeypatch.context() as patch:
        faults = Faults(patch.setattr)
        save_and_wait(checkpointer, "model_0000039")
    assert faults.calls == CALLS_OF_A_SAVE  # no others
    assert resumed(run_folder) == 39


def test_wherever_a_save_is_killed_the_old_or_the_new_checkpoint_is_intact(tmp_path, save_format):
    for kind, n in EACH_CALL:
        run = tmp_path / f"{kind}_{n}"
        Checkpointer(linear(1), run, trainer=Counter(1)).save("model_0000001")
        child = os.fork()
        if child == 0:
            try:
                Faults(setattr, kind, n, lambda: os.kill(os.getpid(), signal.SIGKILL))
                save_and_wait(
                    Checkpointer(linear(2), run, format=save_format, trainer=Counter(2)),
                    "model_0000002",
                )
            finally:
                os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL

        is_renamed = (kind, n) in [("write", 2), ("fsync", 2), ("rename", 2), ("fsync", 3)]
        files = ["last_checkpoint", "model_0000001.pth", *["model_0000002.pth"] * is_renamed]
        files.append("run_id")
        assert sorted({*os.listdir(run)} - {*hidden_files(run)}) == files
        is_tagged = (kind, n) == ("fsync", 3)  # only the folder is not yet durable
        assert resumed(run) == 1 + is_tagged
        assert len(hidden_files(run)) == 1 - is_tagged  # which the next save removes


@pytest.fixture
def file_size_limit():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class Growing(Counter):
    """Its state is large at iteration 3 only."""

    def state_dict(self):
        return {"value": torch.zeros(50_000 if self.value == 3 else 1)}

    def load_state_dict(self, state_dict):
        self.value = len(state_dict["value"])


def test_a_save_that_does_not_fit_leaves_the_one_before(
    tmp_path, file_size_limit, caplog, save_format
):
    state = Growing()
    checkpointer = Checkpointer(linear(1), tmp_path, format=save_format, state=state)
    folder = {}

    def look(trainer):
        checkpointer.has_checkpoint()  # waits
        folder[trainer.iter] = (
            sorted(os.listdir(tmp_path)),
            (tmp_path / "last_checkpoint").read_text(),
        )

    trainer = Steps(step=lambda iter: setattr(state, "value", iter))
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 2, max_to_keep=1)])
    trainer.register_hooks([AfterStep(lambda t: t.iter and look(t))], priority="LOW")
    trainer.train(0, 6)

    assert trainer.status == "finished"
    of_first = (["last_checkpoint", "model_0000001.pth", "run_id"], "model_0000001.pth")
    assert folder == {
        **dict.fromkeys([1, 2, 3, 4], of_first),
        5: (
            ["last_checkpoint", "model_0000001.pth", "model_final.pth", "run_id"],
            "model_final.pth",
        ),
    }
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "is not saved, training continues: cannot write" in error
    assert "model_0000003.pth" in error
    assert "File too large" in error
