"""A folder belongs to one run at a time: the run locks the file ``run.lock`` in it.

The lock keeps other processes out. A script locks the folder before it builds its trainer. Then one trainer uses it,
and `use_folder` keeps other runs of the same process out.
"""

import contextlib
import fcntl
import os
import threading
import time
from pathlib import Path

LOCK_FILE = "run.lock"
_PATIENCE_SEC = 2.0  # a killed process releases its locks only at its very end

_owned: dict[str, int] = {}  # real path -> descriptor of the locked file
_in_use: list[str] = []  # real paths of owned folders in which a run of this process trains
_guard = threading.RLock()  # held while these two are read and changed together


def own_folder(folder: str | os.PathLike[str]) -> None:
    """Make the folder, and lock it until `release_folder` or the end of this process.

    Raises:
        OSError: another run owns it, or uses it in this process, or it cannot be written.
    """
    _own(folder, for_use=False)


def use_folder(folder: str | os.PathLike[str]) -> None:
    """As `own_folder`, for one run of this process, until `leave_folder`."""
    _own(folder, for_use=True)


def _own(folder: str | os.PathLike[str], *, for_use: bool) -> None:
    os.makedirs(folder, exist_ok=True)
    deadline = time.monotonic() + _PATIENCE_SEC
    while not _try_to_own(folder, for_use):
        if time.monotonic() > deadline:
            raise OSError(
                f"the folder {os.fspath(folder)!r} belongs to another run; wait for it or stop it"
            )
        time.sleep(0.05)


def leave_folder(folder: str | os.PathLike[str]) -> None:
    """The run that uses the folder has ended: release it."""
    with _guard:
        if is_in_use(folder):
            _in_use.remove(os.path.realpath(folder))
        release_folder(folder)


def release_folder(folder: str | os.PathLike[str]) -> None:
    """Release the folder for other runs; does nothing if this process does not own it, or one of its runs uses it."""
    with _guard:
        if is_owned(folder) and not is_in_use(folder):
            Path(folder, LOCK_FILE).unlink(missing_ok=True)
            os.close(_owned.pop(os.path.realpath(folder)))


def is_owned(folder: str | os.PathLike[str]) -> bool:
    """Whether this process owns the folder."""
    return os.path.realpath(folder) in _owned


def is_in_use(folder: str | os.PathLike[str]) -> bool:
    """Whether a run of this process uses the folder."""
    return os.path.realpath(folder) in _in_use


def is_owned_by_another(folder: str | os.PathLike[str]) -> bool:
    """Whether another process owns the folder."""
    with _guard:
        if is_owned(folder) or not Path(folder, LOCK_FILE).exists():
            return False
        is_free = _lock(folder)
        release_folder(folder)
        return not is_free


def _try_to_own(folder: str | os.PathLike[str], for_use: bool) -> bool:
    with _guard:
        if is_in_use(folder):
            raise OSError(
                f"the folder {os.fspath(folder)!r} belongs to another run of this process, which is still training; "
                "give each run its own folder"
            )
        is_own = is_owned(folder) or _lock(folder)
        if is_own and for_use:
            _in_use.append(os.path.realpath(folder))
        return is_own


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
