"""Who owns the folder of a run."""

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
from torch import nn

from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.utils import run_folder
from trainkit.utils.run_file import RunFile
from trainkit.utils.run_folder import (
    LOCK_FILE,
    FolderInUseError,
    is_owned_by_another,
    own_folder,
    release_folder,
    renew_folders,
)

OWNER = (
    "import os, sys; from trainkit.utils.run_folder import own_folder; own_folder(sys.argv[1]); "
    "print(os.getpid(), flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch, tmp_path):
    monkeypatch.setattr(run_folder, "_PATIENCE_SEC", 0.0)
    yield
    release_folder(tmp_path)


@pytest.fixture
def owner(tmp_path):
    with owning(tmp_path) as process:
        yield process


@contextmanager
def owning(folder):
    """A process that owns ``folder``."""
    command = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().strip() == str(process.pid)
        yield process
        process.kill()


@pytest.fixture
def no_locks(monkeypatch):
    """A file system without locks."""

    def fail(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", fail)


def leave(folder, pid, host=None):
    (folder / LOCK_FILE).write_text(f"process {pid} on {host or socket.gethostname()}, since yesterday")


def dead_pid():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_second_process_hears_who_owns_the_folder_until_that_one_is_killed(tmp_path, owner, monkeypatch):
    message = f"belongs to another run, process {owner.pid} on {socket.gethostname()}, since 20.*delete '.*run.lock'"
    with pytest.raises(FolderInUseError, match=message):
        own_folder(tmp_path)
    assert is_owned_by_another(tmp_path)

    owner.send_signal(signal.SIGKILL)
    monkeypatch.setattr(run_folder, "_PATIENCE_SEC", 60.0)
    assert own_folder(tmp_path).former.startswith(f"process {owner.pid} on ")
    assert not is_owned_by_another(tmp_path)


def test_a_process_takes_its_folder_as_often_as_it_likes_and_leaves_no_file(tmp_path):
    assert own_folder(tmp_path) is own_folder(f"{tmp_path}/../{tmp_path.name}")
    assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")
    for _ in range(2):
        release_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert own_folder(tmp_path).former == ""


def test_a_fork_has_no_share_in_the_lock(tmp_path):
    own_folder(tmp_path)
    pid = os.fork()
    if pid == 0:
        release_folder(tmp_path)
        os._exit(is_owned_by_another(tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert (tmp_path / LOCK_FILE).exists()


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "elsewhere")
    own_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]


@pytest.mark.parametrize("is_open", [True, False])
def test_a_run_whose_folder_another_one_has_made_anew_writes_nothing_there(tmp_path, is_open):
    folder = tmp_path / "run"
    own_folder(folder)
    file = RunFile(folder / "metrics.json")
    file.append("mine\n")
    if not is_open:
        file.close()
    shutil.rmtree(folder)

    with owning(folder) as process:
        (folder / "metrics.json").write_text("theirs\n")
        for _ in range(2):
            with pytest.raises(FolderInUseError, match=f"belongs to another run, process {process.pid} on"):
                file.append("mine\n")
        with pytest.raises(CheckpointError, match=f"belongs to another run, process {process.pid} on"):
            Checkpointer(nn.Identity(), folder).save("model")
        assert (folder / "metrics.json").read_text() == "theirs\n"
    file.close()
    release_folder(folder)


def test_without_locks_a_live_process_and_another_host_own_their_folder(tmp_path, no_locks):
    for owner in ({"pid": os.getppid()}, {"pid": dead_pid(), "host": "elsewhere"}):
        leave(tmp_path, **owner)
        with pytest.raises(FolderInUseError, match=f"process {owner['pid']} on"):
            own_folder(tmp_path)


def test_without_locks_the_folder_of_a_dead_process_is_taken_over(tmp_path, no_locks):
    for pid in (dead_pid(), os.getpid()):  # the latter: another process of the same number, before a restart
        leave(tmp_path, pid=pid)
        assert own_folder(tmp_path).former == f"process {pid} on {socket.gethostname()}, since yesterday"
        release_folder(tmp_path)


def test_a_folder_that_was_deleted_is_taken_again_with_its_small_files(tmp_path, caplog):
    folder = tmp_path / "run"
    own_folder(folder).restore["file"] = lambda: (folder / "file").write_text("text")
    renew_folders()
    assert [path.name for path in folder.iterdir()] == [LOCK_FILE]
    shutil.rmtree(folder)
    renew_folders()
    assert sorted(path.name for path in folder.iterdir()) == ["file", LOCK_FILE]
    assert caplog.messages == [
        f"The folder {folder} was deleted during the run; the files that the run can restore are written again"
    ]
    release_folder(folder)
    assert not (folder / LOCK_FILE).exists()
