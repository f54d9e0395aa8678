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
    while isinstance(found := _lock(folder, os.O_CREAT), str):
        if time.monotonic() > deadline:
            raise OSError(f"the folder {os.fspath(folder)!r} belongs to another run, {found}; wait for it or stop it")
        time.sleep(0.05)
    os.truncate(found, 0)
    text = f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}"
    os.pwrite(found, text.encode(), 0)
    _owned[_key(folder)] = found


def release_folder(folder: str | os.PathLike[str]) -> None:
    """Release the folder for other runs; does nothing if this process does not own it."""
    if is_owned(folder):
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, LOCK_FILE))
        os.close(_owned.pop(_key(folder)))


def is_owned(folder: str | os.PathLike[str]) -> bool:
    """Whether this process owns the folder."""
    return _key(folder) in _owned


def is_owned_by_another(folder: str | os.PathLike[str]) -> bool:
    """Whether another process owns the folder."""
    if is_owned(folder) or not os.path.exists(os.path.join(folder, LOCK_FILE)):
        return False
    found = _lock(folder)
    if isinstance(found, int):
        os.close(found)
    return isinstance(found, str)


def _key(folder: str | os.PathLike[str]) -> tuple[str, int]:
    return os.path.realpath(folder), os.getpid()


def _lock(folder: str | os.PathLike[str], flags: int = 0) -> int | str:
    """The descriptor of the lock file if this process has locked it, else the name of the owner."""
    descriptor = os.open(os.path.join(folder, LOCK_FILE), os.O_RDWR | os.O_NOFOLLOW | flags, 0o666)
    owner = os.read(descriptor, 4096).decode(errors="replace")
    with contextlib.suppress(BlockingIOError, PermissionError):
        # not `flock`: loader workers would inherit the lock, and may outlive a killed run by seconds
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink > 0:  # its former owner has not deleted it meanwhile
            return descriptor
    os.close(descriptor)
    return owner
