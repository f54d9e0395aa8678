"""A folder belongs to one run at a time: the run locks the file ``run.lock`` in it."""

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path

LOCK_FILE = "run.lock"
_PATIENCE_SEC = 2.0  # a killed process releases its locks only at its very end

_owned: dict[str, int] = {}  # real path -> descriptor of the lock file


def own_folder(folder: str | os.PathLike[str]) -> None:
    """Make the folder, and lock it until `release_folder` or the end of this process.

    Raises:
        OSError: another run owns it, which the message names, or it cannot be written.
    """
    if is_owned(folder):
        return
    os.makedirs(folder, exist_ok=True)
    deadline = time.monotonic() + _PATIENCE_SEC
    while (descriptor := _lock(folder)) is None:
        if time.monotonic() > deadline:
            owner = Path(folder, LOCK_FILE).read_text(errors="replace")
            raise OSError(f"the folder {os.fspath(folder)!r} belongs to another run, {owner}; wait for it or stop it")
        time.sleep(0.05)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}".encode(), 0)
    _owned[os.path.realpath(folder)] = descriptor


def release_folder(folder: str | os.PathLike[str]) -> None:
    """Release the folder for other runs; does nothing if this process does not own it."""
    if is_owned(folder):
        Path(folder, LOCK_FILE).unlink(missing_ok=True)
        os.close(_owned.pop(os.path.realpath(folder)))


def is_owned(folder: str | os.PathLike[str]) -> bool:
    """Whether this process owns the folder."""
    return os.path.realpath(folder) in _owned


def is_owned_by_another(folder: str | os.PathLike[str]) -> bool:
    """Whether another process owns the folder."""
    if is_owned(folder) or not Path(folder, LOCK_FILE).exists():
        return False
    descriptor = _lock(folder)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def _lock(folder: str | os.PathLike[str]) -> int | None:
    """The descriptor of the lock file; None if another process has locked it."""
    descriptor = os.open(Path(folder, LOCK_FILE), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with contextlib.suppress(BlockingIOError, PermissionError):
        # not `flock`: loader workers would inherit the lock, and may outlive a killed run by seconds
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink > 0:  # its former owner has not deleted it meanwhile
            return descriptor
    os.close(descriptor)
    return None
