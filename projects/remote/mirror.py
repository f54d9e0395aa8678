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
import secrets
import socket
from collections.abc import Iterator
from concurrent import futures
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from iopath.common.file_io import get_cache_dir
from trainkit.projects.remote.store import STORE_REGISTRY, CheckpointStore

from trainkit.checkpoint.atomic import write_text
from trainkit.checkpoint.errors import CheckpointError
from trainkit.checkpoint.file import SUFFIX
from trainkit.checkpoint.folder import is_file_of, next_previous, tagged_file
from trainkit.checkpoint.format import owner_of_part
from trainkit.utils.run_folder import LOCK_FILE, is_owned_by_another

_logger = logging.getLogger(__name__)

TAG_FILE = "last_checkpoint"
_MANIFEST = "last_upload.json"
# in the local folder: its random name, and the files that are in the store
_RECORD = ".uploaded.json"


def make_mirror(address: str) -> "Mirror":
    """The `Mirror` for an address; its local folder is in iopath's cache."""
    address = address.rstrip("/")
    readable = re.sub(r"[^\w.-]+", "_", address)[-80:]
    digest = hashlib.sha256(address.encode()).hexdigest()[:8]
    cache = os.path.realpath(get_cache_dir())
    return Mirror(address, os.path.join(cache, "runs", f"{readable}-{digest}"))


class Mirror:
    """The files of a run in a store. Used on rank 0.

    A run that starts again downloads them, unless its local folder has uploaded last: then this has the newest files.
    ``is_taken`` says whether a run of this process writes to the store.
    """

    def __init__(self, address: str, folder: str) -> None:
        self.address = address
        self.folder = folder
        self.is_taken = False
        self._folder = Path(folder)
        self._owner = ""
        self._downloaded: dict[str, Any] = {}  # the manifest of the files that are here
        self._sent: dict[str, list[int]] = {}  # name -> size and time of the local file
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="upload")
        self._queued: futures.Future[str] | None = None

    def download(self) -> None:
        """Replace the local files by those that another folder has uploaded, if any; see `_replace_local_files`.

        Raises CheckpointError if the store cannot be read.
        """
        # then the local files are the newest
        if self.is_taken or is_owned_by_another(self._folder):
            return
        with self._explained("cannot be read"):
            manifest = self._read_manifest()
            if manifest["files"] and manifest != self._downloaded:
                record = self._read_record()
                has_uploaded_last = manifest["folder"] == record["folder"]
                if has_uploaded_last and os.path.exists(tagged_file(str(self._folder))):
                    self._sent = record["sent"]
                else:
                    self._replace_local_files(manifest, record)
            self._downloaded = manifest

    def _replace_local_files(self, manifest: dict[str, Any], record: dict[str, Any]) -> None:
        """Download the files; those that only this folder has are moved to ``previous_<n>`` in it."""
        local = self._list()
        unsent = [name for name in local if record["sent"].get(name) != self._signature(name)]
        if unsent:
            aside = next_previous(self._folder)
            for name in unsent:
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                (self._folder / name).rename(aside / name)
            _logger.warning(
                "%s has the files of a run elsewhere; the files that only %s had are now in %s",
                self.address,
                self._folder,
                aside,
            )
        for name in {*local, TAG_FILE}:
            (self._folder / name).unlink(missing_ok=True)
        self._sent = {}
        for name in sorted(manifest["files"]):
            path = self._folder / name
            path.parent.mkdir(exist_ok=True)
            temporary = self._folder / ".download"
            self._store.get(name, str(temporary))
            temporary.rename(path)
            self._sent[name] = self._signature(name)
            self._write_record(record["folder"])
        if manifest["last_checkpoint"]:
            write_text(manifest["last_checkpoint"], self._folder / TAG_FILE)

    def take(self, resume: bool | None = None) -> None:
        """Note in the store that a run of this process writes there.

        ``resume``: True: download the run first. False: start a new run. None: a new run, unless it was downloaded.

        Raises CheckpointError: a new run would start in a store that has a run, or the store cannot be read or written.
        """
        if resume:
            self.download()
        with self._explained("cannot be the folder of this run"):
            manifest = self._read_manifest()
            if manifest["files"] and (resume is False or manifest != self._downloaded):
                raise FileExistsError(
                    f"it has a run ({manifest['upload']}); use --resume, or another address"
                )
            if not manifest["files"]:
                self._sent = {}
            process = f"process {os.getpid()} on {socket.gethostname()}"
            self._owner = f"last upload by {process}, since {datetime.now()}"
            self._write_manifest(manifest["last_checkpoint"], manifest["files"])
        self.is_taken = True

    def after_save(self, folder: str) -> None:
        """Upload the new files, if this is the mirror of ``folder`` or of another folder of the run."""
        if self.is_taken or folder == self.folder:
            self._upload_soon()

    def _upload_soon(self) -> "futures.Future[str]":
        if self._queued is None or self._queued.running() or self._queued.done():
            self._queued = self._thread.submit(self._upload_or_log)
        return self._queued

    def release(self) -> str:
        """Upload the last files of the run; return the error, or ""."""
        error = ""
        if self.is_taken:
            error = self._upload_soon().result()
        self.is_taken = False
        if not error:
            return ""
        self._downloaded = {}  # the local files are not those in the store
        return (
            f"{error}. They are in {self._folder}: --resume goes on there, "
            "unless another folder has uploaded since"
        )

    @cached_property
    def _store(self) -> Any:
        scheme, _, _ = self.address.partition("://")
        if scheme in STORE_REGISTRY:
            return STORE_REGISTRY.get(scheme)(self.address)
        return CheckpointStore(self.address)

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each store raises its own types
            raise CheckpointError(f"'{self.address}' {what}: {error}") from error

    def _list(self) -> set[str]:
        names = set()
        for path in [*self._folder.glob("*"), *self._folder.glob("*.*-*/*")]:
            name = str(path.relative_to(self._folder))
            if path.is_file() and self._is_of_run(name):
                names.add(name)
        return names

    def _is_of_run(self, name: str) -> bool:
        """Whether a local or remote name is that of a file of the run, in its folder or beside a checkpoint."""
        parent, file = os.path.split(name)
        if parent:
            is_part = owner_of_part(parent) and is_file_of(str(self._folder), parent)
            if not is_part:
                return False
        # TAG_FILE and `_MANIFEST` are read and written separately
        elif file.startswith(".") or file in (LOCK_FILE, TAG_FILE, _MANIFEST):
            return False
        return is_file_of(str(self._folder / parent), file)

    def _upload_or_log(self) -> str:
        try:
            if not self.is_taken:
                self.take()
            with self._explained("does not have all files of the run"):
                self._upload()
            return ""
        except CheckpointError as error:
            _logger.error(
                "%s. Training continues; the next save tries again. The files are in %s",
                error,
                self._folder,
            )
            return str(error)

    def _upload(self) -> None:
        owner = self._read_manifest()["upload"]
        if not owner:
            raise CheckpointError(
                f"{_MANIFEST} is not there; the store cannot be reached, or the run was "
                "removed from it"
            )
        if owner != self._owner:
            raise CheckpointError(f"another run writes there ({owner}); stop one of them")
        names = self._list()
        tag = self._folder / TAG_FILE
        tagged = tag.read_text(encoding="utf-8").strip() if tag.exists() else ""
        self._put_new(names, tagged)
        # the save that has removed the file asks for the next upload
        if tagged and tagged not in names:
            return
        if tagged:
            self._store.put(str(tag), TAG_FILE)
        self._write_manifest(tagged, sorted(names))
        self._write_record(self._downloaded["folder"])
        for name in self._store.list():
            if self._is_of_run(name) and name not in names:
                self._sent.pop(name, None)
                self._store.remove(name)

    def _put_new(self, names: set[str], tagged: str) -> None:
        """Copy the files that are new to the store; those that are gone meanwhile leave ``names``."""
        stem = tagged.removesuffix(SUFFIX)

        def order(name: str) -> tuple[bool, bool]:
            # the newest checkpoint first, before a newer one replaces it here; parts before the file that names them
            return not name.startswith(stem), name.endswith(SUFFIX)

        for name in sorted(names, key=order):
            path = self._folder / name
            try:
                signature = self._signature(name)
                if self._sent.get(name) != signature:
                    self._store.put(str(path), name)
                    self._sent[name] = signature
            except FileNotFoundError:
                if path.exists():
                    raise
                names.discard(name)

    def _signature(self, name: str) -> list[int]:
        found = os.stat(self._folder / name)
        return [found.st_size, found.st_mtime_ns]

    def _read_record(self) -> dict[str, Any]:
        """The random name of the local folder, and the files that it has in the store."""
        path = self._folder / _RECORD
        if not path.exists():
            write_text(json.dumps({"folder": secrets.token_hex(8), "sent": {}}), path)
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return record

    def _write_record(self, name: str) -> None:
        write_text(json.dumps({"folder": name, "sent": self._sent}), self._folder / _RECORD)

    def _read_manifest(self) -> dict[str, Any]:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._store.get(_MANIFEST, str(self._folder / ".manifest"))
        except FileNotFoundError:
            return {"upload": "", "folder": "", "last_checkpoint": "", "files": []}
        found: dict[str, Any] = json.loads((self._folder / ".manifest").read_text(encoding="utf-8"))
        files = [name for name in found["files"] if self._is_of_run(name)]
        return {"folder": "", **found, "files": files}

    def _write_manifest(self, tagged: str, files: list[str]) -> None:
        folder = self._read_record()["folder"]
        self._downloaded = {
            "upload": self._owner,
            "folder": folder,
            "last_checkpoint": tagged,
            "files": files,
        }
        write_text(json.dumps(self._downloaded), self._folder / ".manifest")
        self._store.put(str(self._folder / ".manifest"), _MANIFEST)
