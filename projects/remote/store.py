"""Stores: they keep the files of a run by name, such as at an address of fsspec."""

import os
from collections.abc import Iterable
from typing import Protocol

from trainkit.projects.remote.addresses import open_address

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
        """Remove a file."""


class FsspecStore:
    """A `CheckpointStore` at an address such as ``s3://bucket/run``; raises as `open_address`."""

    def __init__(self, address: str) -> None:
        self._filesystem, root = open_address(address)
        self._root = root.rstrip("/") + "/"

    def put(self, path: str, name: str) -> None:
        self._filesystem.makedirs(os.path.dirname(self._root + name), exist_ok=True)
        self._filesystem.put_file(path, self._root + name)

    def get(self, name: str, path: str) -> None:
        self._filesystem.get_file(self._root + name, path)

    def list(self) -> list[str]:
        self._filesystem.invalidate_cache()  # another machine may write there
        return [found.removeprefix(self._root) for found in self._filesystem.find(self._root)]

    def remove(self, name: str) -> None:
        self._filesystem.rm_file(self._root + name)
