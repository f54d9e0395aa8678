"""Samples in files."""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.file import read_file
from trainkit.config import ConfigError


def samples_of_file(path: str, key: str) -> Iterator[Any]:
    """The samples of one file.

    Args:
        key: if the file has one array, its name in a sample; "": a sample is the array itself.

    Raises:
        ConfigError: the file cannot be read, or does not hold samples.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _READERS:
        raise ConfigError(
            f"--input {path!r} has the suffix {suffix!r}; accepted: {', '.join(_READERS)}"
        )
    is_empty = True
    try:
        for sample in _split(_READERS[suffix](path), key):
            is_empty = False
            yield sample
    except ConfigError as error:
        raise ConfigError(f"--input {path!r} {error}") from None
    except CheckpointError as error:
        raise ConfigError(f"--input: {error}") from None
    except Exception as error:  # torch raises many types on damaged archives
        reason = getattr(error, "strerror", None) or first_line(error)
        raise ConfigError(f"--input {path!r} cannot be read: {reason}") from error
    if is_empty:
        raise ConfigError(f"--input {path!r} holds no samples; name a file that has some")


def first_line(error: Exception) -> str:
    """The type of an error, and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _read_npy(path: str) -> Any:
    return np.load(path, mmap_mode="r")


def _read_npz(path: str) -> dict[str, Any]:
    with np.load(path) as arrays:
        return dict(arrays)


def _read_torch(path: str) -> Any:
    return read_file(path, kind=object)


def _read_image(path: str) -> np.ndarray:
    """One sample, ``[1, H, W]`` or ``[1, H, W, 3]``."""
    try:
        pillow = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError(
            f"is a picture ({error}), which needs the package pillow: pip install pillow"
        ) from None
    with pillow.open(path) as image:
        if image.mode not in ("L", "RGB"):
            image = image.convert("RGB")
        return np.asarray(image)[None]


def _read_json_lines(path: str) -> Iterator[Any]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"is not JSON in line {number}: {error}") from None
            yield _with_arrays(value)


_READERS: dict[str, Callable[[str], Any]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".jsonl": _read_json_lines,
    ".png": _read_image,
    ".jpg": _read_image,
    ".jpeg": _read_image,
}


def _with_arrays(value: Any) -> Any:
    """A value of JSON; lists of numbers become arrays, int64, bool or float32."""
    if isinstance(value, dict):
        return {name: _with_arrays(item) for name, item in value.items()}
    if not isinstance(value, list) or not value:
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return value
    if array.dtype.kind not in "biuf":
        return value
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    return array


def _split(content: Any, key: str) -> Iterator[Any]:
    """Split the content of a file into samples."""
    if isinstance(content, Mapping):
        yield from _split_columns(content)
    elif isinstance(content, np.ndarray | Tensor):
        if content.ndim == 0:
            raise ConfigError("holds a single number; samples are an array [N, ...]")
        for value in content:
            if not key:
                yield value
                continue
            if isinstance(value, np.ndarray):
                value = np.array(value)  # a copy in memory
            yield {key: value}
    elif isinstance(content, list | Iterator):
        yield from content
    else:
        raise ConfigError(
            f"holds a {type(content).__name__}, accepted are arrays, dicts of them and lists of "
            "samples"
        )


def _split_columns(columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, values in columns.items():
        if not getattr(values, "ndim", 0):
            raise ConfigError(f"holds {name!r}, which is not an array [N, ...]; leave it out")
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(
            f"holds arrays of different lengths: {lengths}; the first axis counts the samples"
        )
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))
