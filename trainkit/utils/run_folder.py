"""The folders of a run: no other run may use them at the same time, and deleted ones are created again."""

import atexit
import contextlib
import importlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
_PATIENCE_SEC = 2.0  # a killed process releases its locks only at its very end
_PAUSE_SEC = 0.05

_owned: dict[str, "OwnedFolder"] = {}  # by real path
_renewing = threading.Lock()


class FolderInUseError(OSError):
    """Another run owns the folder; the message says which one."""


class OwnedFolder:
    """A folder with the file ``run.lock``, which names the process, the host and the start time of the run that owns
    it.

    The operating system locks the file (POSIX locks, also over NFS) and drops the lock when the process ends. On a file
    system without locks, the run owns the folder while its process is alive; if the process is on another host, until
    the file is deleted.

    Attributes:
        former: a run that was killed and so has left its lock file here; usually "".
        restore: name -> function that writes this small file again.

    Raises:
        FolderInUseError: another run owns it.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._path = folder, os.path.join(folder, LOCK_FILE)
        self.pid = os.getpid()
        self.former = ""
        self.restore: dict[str, Callable[[], None]] = {}
        self._descriptor = self._take(_PATIENCE_SEC)

    def renew(self) -> bool:
        """Own the folder again if it was deleted; return whether it was."""
        if self._is_there(self._descriptor):
            return False
        deleted, self._descriptor = self._descriptor, self._take(0)
        os.close(deleted)
        return True

    def release(self) -> None:
        with contextlib.suppress(OSError):
            if self._is_there(self._descriptor):
                os.remove(self._path)
        os.close(self._descriptor)

    def _take(self, patience_sec: float) -> int:
        deadline = time.monotonic() + patience_sec
        os.makedirs(self._folder, exist_ok=True)
        while True:
            if os.path.islink(self._path):  # a link could lead anywhere
                os.remove(self._path)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            owner = os.read(descriptor, 4096).decode(errors="replace")
            if _lock(descriptor, owner) and self._is_there(descriptor):
                self.former = owner
                os.ftruncate(descriptor, 0)
                text = f"process {self.pid} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}"
                os.pwrite(descriptor, text.encode(), 0)
                return descriptor
            os.close(descriptor)  # required before the next try: closing any descriptor of the file drops the lock
            if time.monotonic() > deadline:
                raise FolderInUseError(
                    f"the folder {self._folder!r} belongs to another run, {owner}; wait for it or stop it. If it has "
                    f"certainly ended, delete {self._path!r}"
                )
            time.sleep(_PAUSE_SEC)

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False


def own_folder(folder: str | os.PathLike[str]) -> OwnedFolder:
    """Own a folder until `release_folder` or the end of this process; raises as `OwnedFolder`."""
    path = os.path.realpath(folder)
    if not is_owned(path):
        _owned[path] = OwnedFolder(path)
        atexit.register(release_folder, path)
    return _owned[path]


def release_folder(folder: str | os.PathLike[str]) -> None:
    """Release the folder for other runs; does nothing if this process does not own it."""
    if is_owned(folder):
        _owned.pop(os.path.realpath(folder)).release()


def renew_folders() -> None:
    """Own deleted folders again, and write their small files again.

    Raises:
        OSError: a folder cannot be owned or written, or another run owns it.
    """
    with _renewing:
        renewed = [(path, folder) for path, folder in [*_owned.items()] if is_owned(path) and folder.renew()]
    for path, folder in renewed:  # not while the lock is held: a log line may call this again
        logger.error(
            "The folder %s was deleted during the run; the files that the run can restore are written again", path
        )
        for restore in folder.restore.values():
            restore()


def is_owned_by_another(folder: str | os.PathLike[str]) -> bool:
    """Whether a run of another process owns the folder."""
    if is_owned(folder):
        return False
    try:
        descriptor = os.open(os.path.join(folder, LOCK_FILE), os.O_RDWR)
    except OSError:
        return False
    try:
        return not _lock(descriptor, os.read(descriptor, 4096).decode(errors="replace"))
    finally:
        os.close(descriptor)


def is_owned(folder: str | os.PathLike[str]) -> bool:
    """Whether a run of this process owns the folder; a fork, such as a loader worker, does not share the locks."""
    path = os.path.realpath(folder)
    return path in _owned and _owned[path].pid == os.getpid()


def _lock(descriptor: int, owner: str) -> bool:
    """Whether this process has the lock now; ``owner`` is the content of the file."""
    try:
        fcntl = importlib.import_module("fcntl")
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except (ImportError, OSError):  # there are no locks: Windows, some network file systems
        return not owner or _has_ended(owner)
    return True


def _has_ended(owner: str) -> bool:
    """Whether the process of ``owner`` has ended for certain."""
    found = re.match(r"process (\d+) on (.+), since ", owner)
    if found is None or found[2] != socket.gethostname():
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return int(found[1]) == os.getpid()  # equal: a process before the last reboot had this id
