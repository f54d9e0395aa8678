"""The seam for stores. A run whose folder is an address writes to a local folder, whose files go to a store."""

import os
from collections.abc import Iterable
from typing import Any, Protocol

from trainkit.checkpoint.atomic import CheckpointError
from trainkit.utils.file_io import PathManager
from trainkit.utils.plugins import NAMES, load_plugin
from trainkit.utils.registry import Registry

STORE_REGISTRY = Registry("STORE")
"""The scheme of an address -> a function ``(address)`` that returns a `CheckpointStore`. Other schemes are fsspec's."""


class CheckpointStore(Protocol):
    """Keeps the files of a run by name, such as ``log.txt``; `docs/extending.md` has an example.

    Any error of a method is logged, and the next save tries again.
    """

    def put(self, path: str, name: str) -> None:
        """Copy a local file to the store; a file of this name is replaced as a whole."""

    def get(self, name: str, path: str) -> None:
        """Copy a file of the store to a local path. Raises FileNotFoundError if there is none."""

    def list(self) -> Iterable[str]:
        """The names of all files; a name may have one folder in it, with ``/``."""

    def remove(self, name: str) -> None:
        """Remove a file. Raises FileNotFoundError if there is none."""


_mirrors: dict[str, Any] = {}  # local folder -> `trainkit.projects.remote.mirror.Mirror`


def local_folder(path: str) -> str:
    """The local folder for the files of a run: ``path`` itself, or one whose files go to the address ``path``.

    Raises:
        CheckpointError: the run is on several machines, which may not share the local folder.
    """
    if "://" not in path:
        return path
    module = load_plugin(NAMES["Mirror"])
    folder = str(module.folder_of(path))
    if folder not in _mirrors:
        _mirrors[folder] = module.Mirror(path, folder)
    return folder


def mirror_of(folder: str) -> Any:
    """The `Mirror` of this local folder; None if its files go nowhere else."""
    return _mirrors.get(folder)


def upload_soon(folder: str) -> None:
    """Upload the new files of ``folder``, and of the other folders of the run, in threads; errors are logged."""
    for mirror in _mirrors.values():
        if mirror.is_taken or mirror is mirror_of(folder):
            mirror.upload_soon()


def download(path: str | os.PathLike[str], path_manager: Any = PathManager) -> str:
    """The local path of a file; an address such as ``https://...`` is downloaded. Raises CheckpointError."""
    address = os.fspath(path)
    try:
        return str(path_manager.get_local_path(address)) if "://" in address else address
    except Exception as error:  # each file system raises its own types
        raise CheckpointError(f"'{address}' cannot be downloaded: {error}") from error
