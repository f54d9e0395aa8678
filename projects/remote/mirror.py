"""A run whose folder is an address: it writes to a local folder, whose files go to a store.

After each save a thread uploads the files that are new, then ``last_upload.json``, which names all files and the last
checkpoint. Only then are other files in the store removed.
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
from functools import cached_property
from pathlib import Path
from typing import Any

from iopath.common.file_io import get_cache_dir
from trainkit.projects.remote.store import STORE_REGISTRY, CheckpointStore, FsspecStore

from trainkit.checkpoint.atomic import CheckpointError, write_text
from trainkit.checkpoint.file import SUFFIX
from trainkit.checkpoint.folder import is_file_of, mirrors
from trainkit.checkpoint.format import owner_of_part
from trainkit.utils import comm
from trainkit.utils.run_folder import LOCK_FILE, is_owned_by_another

_logger = logging.getLogger(__name__)

TAG_FILE = "last_checkpoint"
_MANIFEST = "last_upload.json"
_STATE = ".uploads.json"  # in the local folder: its last uploads, and size and time of each uploaded file
_NUMBERED = re.compile(r"(.+_(\d{7,}))(\.pth|\.\w+-[0-9a-f]{8}/.+)")  # files of periodic checkpoints, and of the best


def make_mirror(address: str) -> str:
    """Make a `Mirror` for an address; returns its local folder, in iopath's cache.

    Raises:
        CheckpointError: the run is on several machines, which may not share the local folder.
    """
    if comm.get_world_size() > comm.get_local_size() and "FVCORE_CACHE" not in os.environ:
        raise CheckpointError(
            f"'{address}' is an address, and the run is on several machines; set FVCORE_CACHE to a folder that they "
            "share"
        )
    address = address.rstrip("/")
    name = re.sub(r"[^\w.-]+", "_", address)[-80:] + "-" + hashlib.sha256(address.encode()).hexdigest()[:8]
    folder = os.path.join(os.path.realpath(get_cache_dir()), "runs", name)
    mirrors.setdefault(folder, Mirror(address, folder))
    return folder


class Mirror:
    """The files of a run in a store; used on rank 0.

    An empty local file of a numbered checkpoint stands for one that is only in the store.

    Attributes:
        is_taken: whether a run of this process writes to the store.
    """

    def __init__(self, address: str, folder: str) -> None:
        self.address, self.is_taken = address, False
        self._folder, self._is_known = folder, False
        self._own = [""]  # the last upload, and later ones that may have failed
        self._sent: dict[str, list[int]] = {}  # name -> size and time of the local file
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="upload")
        self._queued: futures.Future[str] | None = None

    def download(self) -> None:
        """Replace the local files by those in the store, unless the last upload came from here.

        Of the numbered checkpoints only the last one is downloaded.

        Raises:
            CheckpointError: the store cannot be read.
        """
        if self.is_taken or is_owned_by_another(self._folder):  # then the local files are the newest
            return
        with self._explained("cannot be read"):
            manifest, self._is_known = self._read_manifest(), True
            self._own, tagged = [manifest["upload"]], manifest["last_checkpoint"]
            is_newest = self._read_state(manifest["upload"]) and (not tagged or os.path.lexists(self._here(TAG_FILE)))
            if manifest["upload"] and not is_newest:
                for name in [*self._list(), *filter(os.path.lexists, [self._here(TAG_FILE)])]:
                    os.remove(self._here(name))
                self._get(manifest["files"], tagged)
                if tagged:
                    write_text(tagged, self._here(TAG_FILE))

    def fetch(self, path: str) -> None:
        """Download a checkpoint that is only in the store. Raises as `download`."""
        owner = os.path.basename(path)
        names = [name for name in self._list() if owner in (name, owner_of_part(os.path.dirname(name)))]
        with self._explained("cannot be read"):
            self._get([name for name in names if self._is_placeholder(name)])

    def take(self, resume: bool | None = None) -> None:
        """Note in the store that a run of this process writes there.

        Args:
            resume: True: download the run first. False: start a new run. None: as the last call decided.

        Raises:
            CheckpointError: a new run would start in a store that has a run, or the store cannot be read or written.
        """
        if resume:
            self.download()
        self._is_known = self._is_known and resume is not False
        with self._explained("cannot be the folder of this run"):
            manifest = self._read_manifest()
            if not self._is_known and manifest["files"]:
                raise FileExistsError(f"it has a run ({manifest['upload']}); use --resume, or another address")
            self._sent = self._sent if self._is_known else {}
            self._write_manifest(manifest["last_checkpoint"], manifest["files"])
        self.is_taken = self._is_known = True

    def after_save(self, folder: str) -> None:
        """Upload the new files, if this is the mirror of ``folder`` or of another folder of the run."""
        if self.is_taken or folder == self._folder:
            self._upload_soon()

    def _upload_soon(self) -> None:
        """Let the thread upload the new files; an error is logged."""
        if self._queued is None or self._queued.running() or self._queued.done():
            self._queued = self._thread.submit(self._upload_or_log)

    def release(self) -> str:
        """Upload the last files of the run; return the error, or ""."""
        if not self.is_taken:
            return ""
        self._upload_soon()
        error = "" if self._queued is None else self._queued.result()
        self.is_taken = False
        return error

    # ------------------------------------------------------------------ the work
    @cached_property
    def _store(self) -> CheckpointStore:
        scheme = self.address.partition("://")[0]
        store: CheckpointStore = (STORE_REGISTRY.get(scheme) if scheme in STORE_REGISTRY else FsspecStore)(self.address)
        return store

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each store raises its own types
            raise CheckpointError(f"'{self.address}' {what}: {error}") from error

    def _here(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _list(self) -> set[str]:
        """The names of the local files that are uploaded."""
        folder = Path(self._folder)
        paths = [*folder.glob("*"), *folder.glob("*.*-*/*")]
        return {*filter(self._is_of_run, (path.relative_to(folder).as_posix() for path in paths if path.is_file()))}

    def _is_of_run(self, name: str) -> bool:
        """Whether a local or remote name is that of a file of the run, in its folder or beside a checkpoint."""
        parent, file = os.path.split(name)
        if not parent:  # `_MANIFEST` and TAG_FILE are read and written separately
            return file[:1] != "." and file not in (LOCK_FILE, TAG_FILE, _MANIFEST) and is_file_of(self._folder, file)
        is_part = owner_of_part(parent) and is_file_of(self._folder, parent)
        return bool(is_part) and is_file_of(self._here(parent), file)

    def _is_placeholder(self, name: str) -> bool:
        return _NUMBERED.fullmatch(name) is not None and os.path.getsize(self._here(name)) == 0

    def _get(self, names: Iterable[str], tagged: str | None = None) -> None:
        """Download files; if a checkpoint is ``tagged``, placeholders for the other numbered ones."""
        # the newest last: if a checkpoint is damaged, the times of the files decide which one is tried next
        for name in sorted(names, key=_iteration_in):
            os.makedirs(os.path.dirname(self._here(name)), exist_ok=True)
            match = _NUMBERED.fullmatch(name)
            if match and tagged is not None and match[1] + SUFFIX != tagged:
                Path(self._here(name)).touch()
            else:
                self._store.get(name, self._here(".download"))
                os.replace(self._here(".download"), self._here(name))
            self._sent[name] = _signature(self._here(name))
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
        # the newest checkpoint first, before a newer one replaces it here; parts before the file that names them
        for name in sorted(names, key=lambda name: (not name.startswith(stem), name.endswith(SUFFIX))):
            try:
                signature = _signature(self._here(name))
                if self._sent.get(name) != signature and not self._is_placeholder(name):
                    self._store.put(self._here(name), name)
                    self._sent[name] = signature
            except FileNotFoundError:
                if os.path.exists(self._here(name)):
                    raise
                if stem and name.startswith(stem):  # the thread that has removed the file asks for the next upload
                    return
                names.discard(name)
        if tagged:
            self._store.put(self._here(TAG_FILE), TAG_FILE)
        self._write_manifest(tagged, sorted(names))
        for name in {*filter(self._is_of_run, self._store.list())} - names:
            self._sent.pop(name, None)
            self._store.remove(name)

    def _read_manifest(self) -> dict[str, Any]:
        os.makedirs(self._folder, exist_ok=True)
        path = self._here(".manifest")
        try:
            self._store.get(_MANIFEST, path)
        except FileNotFoundError:
            return {"upload": "", "last_checkpoint": "", "files": []}
        found: dict[str, Any] = json.loads(Path(path).read_text())
        return {**found, "files": [*filter(self._is_of_run, found["files"])]}

    def _write_manifest(self, tagged: str, files: list[str]) -> None:
        upload = f"last upload by process {os.getpid()} on {socket.gethostname()}, {datetime.now()}"
        self._own.append(upload)
        self._write_state()  # before the upload, so that after a kill this folder still counts as the newest
        manifest = {"upload": upload, "last_checkpoint": tagged, "files": files}
        write_text(json.dumps(manifest), self._here(".manifest"))
        self._store.put(self._here(".manifest"), _MANIFEST)
        self._own = [upload]

    def _read_state(self, upload: str) -> bool:
        """Whether the last upload came from this folder, or was downloaded to it."""
        self._sent = {}
        with contextlib.suppress(OSError, LookupError, TypeError, ValueError):  # the file is missing or damaged
            state: Any = json.loads(Path(self._here(_STATE)).read_text())
            if upload in state["uploads"]:
                self._sent = dict(state["files"])
                return True
        return False

    def _write_state(self) -> None:
        write_text(json.dumps({"uploads": self._own, "files": self._sent}), self._here(_STATE))


def _iteration_in(name: str) -> int:
    match = _NUMBERED.fullmatch(name)
    return -1 if match is None else int(match[2])


def _signature(path: str) -> list[int]:
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns]
