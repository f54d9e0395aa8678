"""A run whose folder is an address of fsspec, such as ``s3://bucket/run``.

The run writes to a local folder. After each save a thread uploads the files that are new, then ``last_upload.json``,
which names all files and the last checkpoint. Only then are files at the address removed.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import socket
from collections.abc import Iterable, Iterator
from concurrent import futures
from datetime import datetime
from pathlib import Path
from typing import Any

from iopath.common.file_io import get_cache_dir

from trainkit.checkpoint.atomic import CheckpointError, write_text
from trainkit.checkpoint.file import SUFFIX, is_file_of
from trainkit.checkpoint.folder import TAG_FILE
from trainkit.checkpoint.format import owner_of_part, remove_parts
from trainkit.utils import comm
from trainkit.utils.file_io import PathManager, open_address
from trainkit.utils.run_folder import LOCK_FILE, is_owned_by_another

_logger = logging.getLogger(__name__)

_MANIFEST = "last_upload.json"
_STATE = ".uploads.json"  # a file in the local folder: its last upload, and size and time of each uploaded file
_NUMBERED = re.compile(r"(.+_(\d{7,}))(\.pth|\.shards-.+)")  # files of periodic checkpoints, and of the best ones

_NO_RUN: dict[str, Any] = {"upload": "", "last_checkpoint": "", "files": [], "removed": []}
_remotes: dict[str, "RemoteFolder"] = {}  # by local folder


def local_folder(path: str) -> str:
    """The local folder for the files of a run: ``path`` itself, or, for an address, a folder in iopath's cache.

    Raises:
        CheckpointError: the run is on several machines, which may not share the cache.
    """
    if "://" not in path:
        return path
    if comm.get_world_size() > comm.get_local_size() and "FVCORE_CACHE" not in os.environ:
        raise CheckpointError(
            f"'{path}' is an address, and the run is on several machines; set FVCORE_CACHE to a folder that they share"
        )
    address = path.rstrip("/")
    name = re.sub(r"[^\w.-]+", "_", address)[-80:] + "-" + hashlib.sha256(address.encode()).hexdigest()[:8]
    folder = os.path.join(os.path.realpath(get_cache_dir()), "runs", name)
    if folder not in _remotes:
        _remotes[folder] = RemoteFolder(address, folder)
    return folder


def remote_of(folder: str) -> "RemoteFolder | None":
    """The address to which the files of this local folder are uploaded; None if there is none."""
    return _remotes.get(folder)


def upload_soon(folder: str) -> None:
    """Upload the new files of ``folder``, and of the other folders of the run, in threads; errors are logged."""
    for remote in _remotes.values():
        if remote.is_taken or remote is remote_of(folder):
            remote.upload_soon()


def download(address: str, path_manager: Any = PathManager) -> str:
    """The path of a local copy. Raises CheckpointError if the file cannot be downloaded."""
    try:
        return str(path_manager.get_local_path(address))
    except Exception as error:  # each file system raises its own types
        raise CheckpointError(f"'{address}' cannot be downloaded: {error}") from error


def remove_from_run(path: str) -> None:
    """Remove a checkpoint with its shards; if it is only at the address, the next upload removes it there.

    Raises:
        OSError: something cannot be removed.
    """
    remote = remote_of(os.path.dirname(path))
    if remote is None or not remote.forget(os.path.basename(path)):
        os.remove(path)
        remove_parts(path)


class RemoteFolder:
    """The files of a run at an address; used on rank 0.

    Attributes:
        is_taken: whether a run of this process writes to the address.
        only_there: names of the numbered checkpoints that are only at the address.
    """

    def __init__(self, address: str, folder: str) -> None:
        self.address, self.is_taken, self.only_there = address, False, set[str]()
        self._folder, self._is_known = folder, False
        self._manifest = _NO_RUN
        self._own = [""]  # the last upload, and later uploads that may have failed
        self._uploaded: dict[str, list[int]] = {}  # name -> size and time of the local file
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="upload")
        self._queued: futures.Future[str] | None = None

    def download(self) -> None:
        """Replace the local files by those at the address, unless the last upload came from here.

        Of the numbered checkpoints only the last one is downloaded.

        Raises:
            CheckpointError: the address cannot be read.
        """
        if self.is_taken or is_owned_by_another(self._folder):  # then the local files are the newest
            return
        with self._explained("cannot be read"):
            self._manifest, self._is_known = self._read_manifest(), True
            self._own = [self._manifest["upload"]]
            tagged, names = self._manifest["last_checkpoint"], {*self._manifest["files"]}
            is_newest = self._read_state() and (not tagged or os.path.lexists(self._here(TAG_FILE)))
            if self._manifest["upload"] and not is_newest:
                for name in [*self._list(), *filter(os.path.lexists, [self._here(TAG_FILE)])]:
                    os.remove(self._here(name))
                numbered = {name: match[1] for name in names if (match := _NUMBERED.fullmatch(name))}
                self._get(names - {name for name, stem in numbered.items() if stem + SUFFIX != tagged})
                if tagged:
                    write_text(tagged, self._here(TAG_FILE))
            self.only_there = names - self._list()

    def download_older(self) -> bool:
        """Download the other numbered checkpoints too; return whether there are any. Raises as `download`."""
        older, self.only_there = self.only_there, set()
        with self._explained("cannot be read"):
            self._get(older)
        return bool(older)

    def take(self, resume: bool | None = None) -> None:
        """Note at the address that a run of this process writes there.

        Args:
            resume: True: download the run first. False: start a new run. None: as the last call decided.

        Raises:
            CheckpointError: a new run would start at an address that has a run, or the address cannot be read or
                written.
        """
        if resume:
            self.download()
        self._is_known = self._is_known and resume is not False
        with self._explained("cannot be the folder of this run"):
            if not self._is_known:
                self._manifest, self._uploaded = self._read_manifest(), {}
                if self._manifest["files"]:
                    raise FileExistsError(
                        f"it has a run ({self._manifest['upload']}); use --resume, or another address"
                    )
            self._filesystem.makedirs(self._root, exist_ok=True)
            self._write_manifest()
        self.is_taken = self._is_known = True

    def upload_soon(self) -> None:
        """Let the thread upload the new files; an error is logged."""
        if self._queued is None or self._queued.running() or self._queued.done():
            self._queued = self._thread.submit(self._upload_or_log)

    def release(self) -> str:
        """Upload the last files of the run; return the error, or ""."""
        if not self.is_taken:
            return ""
        self.upload_soon()
        error = "" if self._queued is None else self._queued.result()
        self.is_taken = False
        return error

    def forget(self, name: str) -> bool:
        """If a checkpoint is only at the address, let the next upload remove it there; return whether this is so."""
        gone = {it for it in self.only_there if it == name or it.startswith(name.removesuffix(SUFFIX) + ".shards-")}
        self.only_there -= gone
        return bool(gone)

    # ------------------------------------------------------------------ the work

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            self._filesystem, self._root = open_address(self.address)
            yield
        except Exception as error:
            raise CheckpointError(f"'{self.address}' {what}: {error}") from error

    def _here(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _there(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _list(self) -> set[str]:
        """The names of the local files that are uploaded."""
        folder = Path(self._folder)
        paths = [*folder.glob("*"), *folder.glob("*.shards-*/*")]
        return {*filter(self._is_of_run, (str(path.relative_to(folder)) for path in paths if path.is_file()))}

    def _is_of_run(self, name: str) -> bool:
        """Whether a local or remote name is that of a file of the run, in its folder or in a folder of shards."""
        parent, file = os.path.split(name)
        if not parent:  # `_MANIFEST` and TAG_FILE are read and written separately
            return file[:1] != "." and file not in (LOCK_FILE, TAG_FILE, _MANIFEST) and is_file_of(self._folder, file)
        is_of_shards = owner_of_part(parent) and is_file_of(self._folder, parent)
        return bool(is_of_shards) and is_file_of(self._here(parent), file)

    def _get(self, names: Iterable[str]) -> None:
        # the newest last: if a checkpoint is damaged, the times of the files decide which one is tried next
        for name in sorted(names, key=_iteration_in):
            os.makedirs(os.path.dirname(self._here(name)), exist_ok=True)
            self._filesystem.get_file(self._there(name), self._here(".download"))
            os.replace(self._here(".download"), self._here(name))
            self._uploaded[name] = _signature(self._here(name))
        self._write_state()

    def _upload_or_log(self) -> str:
        try:
            if not self.is_taken:
                self.take()
            with self._explained("does not have all files of the run"):
                self._upload()
            return ""
        except CheckpointError as error:
            _logger.error("%s. Training continues; the next save tries again. The files are in %s", error, self._folder)
            return str(error)

    def _upload(self) -> None:
        if (upload := self._read_manifest()["upload"]) not in self._own:
            raise CheckpointError(f"another run writes there ({upload or 'its files were removed'}); stop one of them")
        tagged, names = "", self._list()
        with contextlib.suppress(FileNotFoundError), open(self._here(TAG_FILE)) as file:
            tagged = file.read().strip()
        stem = tagged.removesuffix(SUFFIX)
        # the newest checkpoint first, before a newer one replaces it here; shards before the file with their names
        for name in sorted(names, key=lambda name: (not name.startswith(stem), name.endswith(SUFFIX))):
            try:
                signature = _signature(self._here(name))
                if self._uploaded.get(name) != signature:
                    self._filesystem.makedirs(os.path.dirname(self._there(name)), exist_ok=True)
                    self._filesystem.put_file(self._here(name), self._there(name))
                    self._uploaded[name] = signature
            except FileNotFoundError:
                if os.path.exists(self._here(name)):
                    raise
                if stem and name.startswith(stem):  # the thread that has removed the file asks for the next upload
                    return
                names.discard(name)
        if tagged:
            self._filesystem.pipe_file(self._there(TAG_FILE), tagged.encode())
        self.only_there -= names
        # files to remove are named too: if this process is killed, the next process removes them
        files, former = sorted(names | self.only_there), self._manifest["files"] + self._manifest["removed"]
        removed = sorted({*former}.difference(files))
        self._manifest = {**self._manifest, "last_checkpoint": tagged, "files": files, "removed": removed}
        self._write_manifest()
        for name in removed:
            self._uploaded.pop(name, None)
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.rm_file(self._there(name))
        self._manifest["removed"] = []

    def _read_manifest(self) -> dict[str, Any]:
        try:
            found = json.loads(self._filesystem.cat_file(self._there(_MANIFEST)))
        except FileNotFoundError:
            return dict(_NO_RUN)
        return {**found, **{key: [*filter(self._is_of_run, found[key])] for key in ("files", "removed")}}

    def _write_manifest(self) -> None:
        upload = f"last upload by process {os.getpid()} on {socket.gethostname()}, {datetime.now()}"
        self._own.append(upload)
        self._write_state()  # before the upload, so that after a kill this folder still counts as the newest
        self._manifest = {**self._manifest, "upload": upload}
        self._filesystem.pipe_file(self._there(_MANIFEST), json.dumps(self._manifest).encode())
        self._own = [upload]

    def _read_state(self) -> bool:
        """Whether the last upload came from this folder, or was downloaded to it."""
        self._uploaded = {}
        with contextlib.suppress(OSError, LookupError, TypeError, ValueError):  # the file is missing or damaged
            with open(self._here(_STATE), encoding="utf-8") as file:
                state = json.load(file)
            if self._manifest["upload"] in state["uploads"]:
                self._uploaded = dict(state["files"])
                return True
        return False

    def _write_state(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        write_text(json.dumps({"uploads": self._own, "files": self._uploaded}), self._here(_STATE))


def _iteration_in(name: str) -> int:
    match = _NUMBERED.fullmatch(name)
    return -1 if match is None else int(match[2])


def _signature(path: str) -> list[int]:
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns]
