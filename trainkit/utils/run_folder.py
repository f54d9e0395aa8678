"""A folder belongs to one run at a time: the run locks the file ``run.lock`` in it."""

import contextlib
import fcntl
import os
import socket
import time
from datetime import datetime

LOCK_FILE = "run.lock"
_PATIENCE_SEC = 2.0  # a killed process releases its locks only at its very end

_owned: dict[tuple[str, int], int] = {}  # (real path, process id) -> descriptor; a forked process does not own the lock


def own_folder(folder: str | os.PathLike[str]) -> None:
    """Make the folder, and lock it until `release_folder` or the end of this process.

    Raises:
        OSError: another run owns it, which the message names, or it cannot be written.
    """
    if is_owned(folder):
        return
    os.makedirs(folder, exist_ok=True)
    deadline = time.monotonic() + _PATIENCE_SEC
    # not `flock`: loader workers would inherit the lock, and may outlive a killed run by seconds
    while not _lock(descriptor := os.open(_lock_file(folder), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)):
        owner = os.read(descriptor, 4096).decode(errors="replace")
        os.close(descriptor)
        if time.monotonic() > deadline:
            raise OSError(f"the folder {os.fspath(folder)!r} belongs to another run, {owner}; wait for it or stop it")
        time.sleep(0.05)
    os.truncate(descriptor, 0)
    text = f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}"
    os.write(descriptor, text.encode())
    _owned[_key(folder)] = descriptor


def release_folder(folder: str | os.PathLike[str]) -> None:
    """Release the folder for other runs; does nothing if this process does not own it."""
    if is_owned(folder):
        with contextlib.suppress(FileNotFoundError):
            os.remove(_lock_file(folder))
        os.close(_owned.pop(_key(folder)))


def is_owned(folder: str | os.PathLike[str]) -> bool:
    """Whether this process owns the folder."""
    return _key(folder) in _owned


def is_owned_by_another(folder: str | os.PathLike[str]) -> bool:
    """Whether another process owns the folder."""
    if is_owned(folder) or not os.path.exists(_lock_file(folder)):
        return False
    descriptor = os.open(_lock_file(folder), os.O_RDWR)
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


def _key(folder: str | os.PathLike[str]) -> tuple[str, int]:
    return os.path.realpath(folder), os.getpid()


def _lock_file(folder: str | os.PathLike[str]) -> str:
    return os.path.join(folder, LOCK_FILE)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return os.fstat(descriptor).st_nlink > 0  # the owner before has deleted the file
