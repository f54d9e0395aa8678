"""The files at an address of fsspec."""

import os

from trainkit.utils.file_io import open_address


class FsspecStore:
    """A `CheckpointStore` at an address such as ``s3://bucket/run``; raises as `open_address`."""

    def __init__(self, address: str) -> None:
        self._filesystem, root = open_address(address)
        self._root = root.rstrip("/")

    def put(self, path: str, name: str) -> None:
        self._filesystem.makedirs(os.path.dirname(self._there(name)), exist_ok=True)
        self._filesystem.put_file(path, self._there(name))

    def get(self, name: str, path: str) -> None:
        self._filesystem.get_file(self._there(name), path)

    def list(self) -> list[str]:
        self._filesystem.invalidate_cache()  # another machine may write there
        return [found.removeprefix(f"{self._root}/") for found in self._filesystem.find(self._root)]

    def remove(self, name: str) -> None:
        self._filesystem.rm_file(self._there(name))

    def _there(self, name: str) -> str:
        return f"{self._root}/{name}"
