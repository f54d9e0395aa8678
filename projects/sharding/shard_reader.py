"""Reads a folder of shards without running code from it. Imported only when needed, since it imports much of torch.

torch unpickles the file ``.metadata`` without limits. This module imports no names except number types; every other
object becomes an empty record that keeps its state. The metadata is rebuilt from these records.
"""

import pickle
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Size
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from trainkit.utils.file_io import refuse_pipe


class ShardReader(FileSystemReader):
    """Reads tensors only, since torch would unpickle other objects without limits, and only from ``files``."""

    def __init__(self, folder: str, files: Collection[str]) -> None:
        super().__init__(folder)
        self._metadata = _read_metadata(f"{folder}/.metadata", files)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _Place(NamedTuple):
    """Where a part of a tensor is in the whole tensor; torch's reader uses these attribute names."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class _Record:
    """Replaces an object, also the result of a function; ``state`` is the object's state in the file."""

    state: Any = None

    def __init__(self, *args: object) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" == "builtins.getattr":
            # a member of an enum, from Python 3.11.0 to 3.11.3
            return _Record
        if not f"{module}.".startswith(("torch.", "pathlib.")):
            raise pickle.UnpicklingError(f"it needs {module}.{name}, and only tensors are accepted")
        if module == "torch":
            if name == "Size":
                return Size
            dtype = getattr(torch, name, None)
            if isinstance(dtype, torch.dtype):
                return dtype
        return _Record


def _read_metadata(path: str, files: Collection[str]) -> Metadata:
    """Raises ValueError: the file is not metadata, or names a file that may not be read; OSError: it cannot be read."""
    refuse_pipe(path)
    with open(path, "rb") as file:
        try:
            found = _Unpickler(file).load().state
            tensors = {}
            for name, entry in found["state_dict_metadata"].items():
                tensors[str(name)] = _tensor(entry.state)
            places = {}
            for index, place in found["storage_data"].items():
                places[_index(index.state)] = _place(place.state)
        except pickle.UnpicklingError as error:
            raise ValueError(f"'{path}' is refused: {error}") from None
        except Exception as error:  # a file with other content raises errors of many types
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"'{path}' describes no tensors ({reason}); use another checkpoint"
            ) from error
    unknown = {place.relative_path for place in places.values()}.difference(files)
    if unknown:
        raise ValueError(
            f"'{path}' is refused: it names {min(unknown)!r}; accepted are {sorted(files)}"
        )
    return Metadata(state_dict_metadata=tensors, storage_data=places)


def _tensor(state: dict[str, Any]) -> Any:
    chunks = []
    for chunk in state["chunks"]:
        offsets = Size(chunk.state["offsets"])
        sizes = Size(chunk.state["sizes"])
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    properties = TensorProperties(state["properties"].state[0])
    return TensorStorageMetadata(properties, Size(state["size"]), chunks)


def _index(state: dict[str, Any]) -> MetadataIndex:
    return MetadataIndex(str(state["fqn"]), Size(state["offset"]))


def _place(state: dict[str, Any]) -> _Place:
    return _Place(str(state["relative_path"]), int(state["offset"]), int(state["length"]))
