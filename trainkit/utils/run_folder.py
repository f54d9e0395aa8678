"""A folder belongs to one run at a time: the run locks the file ``run.lock`` in it.

The lock keeps other processes out. A script locks the folder before it builds its trainer. Then one
trainer uses it, and `use_folder` keeps other runs of the same process out.

The lock is one of ``flock``: it belongs to the open file, so it stays when other code of the
process opens and closes ``run.lock``. A forked process inherits the open file, and would keep the
lock after its parent was killed, so it closes the file at its start.
"""

import errno
import functools
import logging
import os
import threading
import time
from pathlib import Path

try:
    import fcntl
except ImportError as error:
    raise ImportError(
        "trainkit runs on Linux and macOS: it locks folders by fcntl, which this platform does not "
        "have. On Windows use WSL"
    ) from error

_logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
_PATIENCE_SEC = 2.0  # a killed process releases its locks only at its very end
# NFS without its lock service, Lustre mounted without locks, and others
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)

_owned: dict[str, int] = {}  # real path -> descriptor of the locked file
_in_use: set[str] = set()  # real paths of owned folders in which a run of this process trains
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
    """Release the folder for other runs.

    Does nothing if this process does not own it, or if one of its runs uses it.
    """
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
                f"the folder {os.fspath(folder)!r} belongs to another run of this process, which "
                "is still training; give each run its own folder"
            )
        is_own = is_owned(folder) or _lock(folder)
        if is_own and for_use:
            _in_use.add(os.path.realpath(folder))
        return is_own


def _lock(folder: str | os.PathLike[str]) -> bool:
    """Try to lock the folder for this process; whether it is locked now."""
    _close_in_child_processes()
    descriptor = os.open(Path(folder, LOCK_FILE), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            os.close(descriptor)
            raise
        _logger.warning(
            "The file system of '%s' has no locks (%s), so nothing keeps a second run out of this "
            "folder",
            os.fspath(folder),
            error.strerror,
        )
    # its former owner has deleted the file meanwhile
    if os.fstat(descriptor).st_nlink == 0:
        os.close(descriptor)
        return False
    _owned[os.path.realpath(folder)] = descriptor
    return True


@functools.cache  # once in a process: it cannot be undone
def _close_in_child_processes() -> None:
    # with the guard, so that no file is open that `_owned` does not name
    os.register_at_fork(
        before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_own_nothing
    )


def _own_nothing() -> None:
    """In a forked process: its parent owns the folders."""
    for descriptor in _owned.values():
        os.close(descriptor)
    _owned.clear()
    _in_use.clear()
    _guard.release()
