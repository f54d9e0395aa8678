"""A folder belongs to one run at a time: the run locks the file ``run.lock`` in it."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

LOCK_FILE = "run.lock"
_PATIENCE_SEC = 2.0  # a killed process releases its locks only at its very end

_owned: dict[str, int] = {}  # real path -> descriptor of the locked file


def own_folder(folder: str | os.PathLike[str]) -> None:
    """Make the folder, and lock it until `release_folder` or the end of this process.

    Raises:
        OSError: another run owns it, or it cannot be written.
    """
    os.makedirs(folder, exist_ok=True)
    deadline = time.monotonic() + _PATIENCE_SEC
    while not is_owned(folder) and not _lock(folder):
        if time.monotonic() > deadline:
            raise OSError(
                f"the folder {os.fspath(folder)!r} belongs to another run; wait for it or stop it"
            )
        time.sleep(0.05)


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
    is_free = _lock(folder)
    release_folder(folder)
    return not is_free


def _lock(folder: str | os.PathLike[str]) -> bool:
    descriptor = os.open(Path(folder, LOCK_FILE), os.O_RDWR | os.O_CREAT, 0o666)
    with contextlib.suppress(BlockingIOError, PermissionError):
        # not `flock`: loader workers would inherit the lock, and may outlive a killed run by seconds
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:  # its former owner has not deleted it meanwhile
            _owned[os.path.realpath(folder)] = descriptor
            return True
    os.close(descriptor)
    return False
