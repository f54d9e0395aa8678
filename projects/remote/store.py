"""Addresses of fsspec, such as ``s3://bucket/run``: single files, and the files of a run by name."""

import importlib
import os
import secrets
from typing import Any

from iopath.common.file_io import PathHandler, get_cache_dir

from trainkit.utils.file_io import PathManager
from trainkit.utils.registry import Registry

STORE_REGISTRY = Registry("STORE")
"""The scheme of an address -> a function ``(address)`` that returns a store. Other schemes are fsspec's."""


class CheckpointStore:
    """Keeps the files of a run by name, such as ``log.txt``, at an address of fsspec.

    A store of your own has these four methods; `docs/extending.md` has an example. Any error of a method is logged, and
    the next save tries again.
    """

    def __init__(self, address: str) -> None:
        self._filesystem, root = _open(address)
        self._root = root.rstrip("/") + "/"

    def put(self, path: str, name: str) -> None:
        """Copy a local file to the store; a file of this name is replaced as a whole."""
        remote = self._root + name
        self._filesystem.makedirs(os.path.dirname(remote), exist_ok=True)
        self._filesystem.put_file(path, remote)

    def get(self, name: str, path: str) -> None:
        """Copy a file of the store to a local path. Raises FileNotFoundError if there is none."""
        self._filesystem.get_file(self._root + name, path)

    def list(self) -> list[str]:
        """The names of all files; a name may have one folder in it, with ``/``."""
        self._filesystem.invalidate_cache()  # another machine may write there
        paths = self._filesystem.find(self._root)
        return [path.removeprefix(self._root) for path in paths]

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._filesystem.rm_file(self._root + name)


class FsspecHandler(PathHandler):
    """Reads and writes files at addresses of fsspec; a file is downloaded again if it has changed at its address."""

    def _get_supported_prefixes(self) -> list[str]:
        kinds = "s3 s3a gs gcs az abfs abfss hdfs webhdfs hf sftp smb memory"
        return [f"{kind}://" for kind in kinds.split()]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        filesystem, remote = _open(path)
        folder = os.path.join(get_cache_dir(), "fsspec", filesystem.ukey(remote))
        local = os.path.join(folder, os.path.basename(remote))
        if force or not os.path.exists(local):
            os.makedirs(folder, exist_ok=True)
            temporary = f"{local}.{secrets.token_hex(4)}"
            filesystem.get_file(remote, temporary)
            os.replace(temporary, local)
        return local

    def _copy_from_local(
        self, local_path: str, dst_path: str, overwrite: bool = False, **kwargs: Any
    ) -> bool:
        filesystem, remote = _open(dst_path)
        filesystem.put_file(local_path, remote)
        return True


def register_addresses(path_manager: Any = PathManager) -> None:
    """Let ``path_manager`` open addresses of fsspec."""
    path_manager.register_handler(FsspecHandler(), allow_override=True)


def _open(address: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it."""
    found: tuple[Any, str] = importlib.import_module("fsspec.core").url_to_fs(address)
    return found
