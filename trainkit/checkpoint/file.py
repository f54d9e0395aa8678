"""One checkpoint file: written completely or not at all, and verified before it is read.

It has the format of ``torch.save``: a zip archive with a CRC for each record. ``torch.load`` ignores these CRCs, so the
readers here check them. The saved dict has one more key, ``MARKER``, which marks trainkit's files; readers here remove
it. Older trainkit files have a digest after the archive, which is ignored.
"""

import contextlib
import hashlib
import importlib
import io
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainkit.checkpoint.atomic import CheckpointError, replacing
from trainkit.checkpoint.state import plain_state
from trainkit.utils.registry import did_you_mean

SUFFIX = ".pth"
# errors of `peek_file`, or of reading its result, if the file is not a checkpoint of a trainer
UNREADABLE = (OSError, RuntimeError, ValueError, LookupError, TypeError, pickle.UnpicklingError)
SAFETENSORS_SUFFIX = ".safetensors"  # such a file holds only weights
MARKER = "__trainkit_format__"

_FOLDER = 0x10  # the bit for folders in a record's attributes


def write_file(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write ``state`` to ``path``; if this is interrupted, ``path`` is the old file or the complete new one.

    Raises:
        TypeError: ``state`` holds a value that is neither a tensor nor a plain Python value.
        CheckpointError: the file cannot be written; no partial file stays.
    """
    write_plain(plain_state(dict(state)), path)


def write_plain(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """`write_file` for a state that `plain_state` has returned."""
    with replacing(os.fspath(path)) as output:
        torch.save({MARKER: 2, **state}, output)


def peek_file(path: str | os.PathLike[str]) -> Any:
    """The content of a checkpoint, not verified. The file is memory-mapped: only entries that are used are read."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def read_file(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """Verify and read a checkpoint of trainkit, a plain file of ``torch.save``, or a ``.safetensors`` file.

    Raises:
        CheckpointError: the file is missing or damaged, or holds more than tensors and plain Python values;
            or the package ``safetensors`` is missing.
    """
    path = os.fspath(path)
    if path.endswith(SAFETENSORS_SUFFIX):
        with _opened(path) as file:
            try:
                weights = import_safetensors().load(file.read())
            except Exception as error:  # a SafetensorError, a KeyError for a dtype that torch does not have, ...
                raise CheckpointError(f"'{path}' cannot be read as safetensors: {error}") from error
        return {"model": {name: weight.to(map_location) for name, weight in weights.items()}}
    state = read_any(path, map_location)
    if not isinstance(state, dict):
        raise CheckpointError(f"'{path}' holds a {type(state).__name__}; a checkpoint is a dict")
    state.pop(MARKER, None)
    return state


def read_any(path: str, map_location: Any = "cpu") -> Any:
    """Verify and read a file of ``torch.save`` that need not be a checkpoint. Raises CheckpointError as `read_file`."""
    with _opened(path) as file:
        if file.read(2) == b"PK":
            _check_records(file, path)
        file.seek(0)
        return _unpickle(file, path, map_location)


def write_safetensors(weights: Mapping[str, Any], path: str) -> None:
    """Write tensors by name to ``path``, as `write_file` does; tied weights are stored under each of their names.

    Raises:
        TypeError: a value is not a tensor.
        CheckpointError: the file cannot be written, or the package ``safetensors`` is missing; no partial file stays.
    """
    for name, weight in weights.items():
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"{name!r} is a {type(weight).__name__}; safetensors takes tensors alone")
    content = import_safetensors().save({name: weight.clone().contiguous() for name, weight in weights.items()})
    with replacing(path) as output:
        output.write(content)


def import_safetensors() -> Any:
    """Import the module of safetensors for torch.

    Raises:
        CheckpointError: the package ``safetensors`` is missing.
    """
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise CheckpointError("this needs the package safetensors: pip install 'trainkit[safetensors]'") from None


def load_trusted_pickle(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a pickle, or any file of ``torch.save``. **This runs code from the file**, with all your rights.

    Use it in your own `Checkpointer._load_file`, and only for files that you trust.

    Raises:
        CheckpointError: the file is missing or damaged, needs a class that cannot be imported, or holds no dict.
    """
    path = os.fspath(path)
    with _opened(path) as file:
        is_archive = file.read(2) == b"PK"
        file.seek(0)
        try:
            state = None if is_archive else pickle.load(file, encoding="latin1")  # latin1 for pickles of Python 2
            if is_archive or state == torch.serialization.MAGIC_NUMBER:
                file.seek(0)
                state = torch.load(file, map_location="cpu", weights_only=False)
        except Exception as error:  # code in the file may raise anything
            raise CheckpointError(
                f"'{path}' cannot be read as a pickle: {type(error).__name__}: {error}; install what it needs, or use "
                "another file"
            ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"'{path}' holds a {type(state).__name__}; a checkpoint is a dict")
    return state


def is_ours(path: str | os.PathLike[str]) -> bool:
    """Whether a file has the marker of :func:`write_file`; the file is not verified."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("archive/data.pkl") as pickled:
            return MARKER.encode() in pickled.read(200)
    except Exception:  # zipfile raises many types
        return False


def is_file_of(folder: str, name: str) -> bool:
    """Whether ``name`` is a file name in ``folder`` without a path, and not a link out of it; it need not exist."""
    is_name = name.isprintable() and name not in (os.curdir, os.pardir) and os.path.basename(name) == name
    return is_name and os.path.dirname(os.path.realpath(os.path.join(folder, name))) == os.path.realpath(folder)


def sha256_of(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            sha256.update(data)
    return sha256.hexdigest()


@contextlib.contextmanager
def _opened(path: str) -> Iterator[io.BufferedReader]:
    try:
        with open(path, "rb") as file:
            yield file
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read '{path}': {_read_failure(error, path)}") from error


def _read_failure(error: OSError, path: str) -> str:
    folder, name = os.path.split(os.path.abspath(path))
    if not isinstance(error, FileNotFoundError):
        return str(error.strerror)
    if not os.path.isdir(folder):
        return f"its folder '{folder}' does not exist"
    return f"no such file; {did_you_mean(name, os.listdir(folder))}".rstrip("; ")


def _check_records(file: io.BufferedReader, path: str) -> None:
    """Compare the records of a zip archive with their CRCs."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            if any(record.external_attr & _FOLDER for record in records):
                raise zipfile.BadZipFile("a record is marked as a folder, which torch.load leaves out without a word")
            size = sum(record.file_size for record in records)
            if size > os.fstat(file.fileno()).st_size:  # torch.save does not compress
                raise zipfile.BadZipFile(f"its records hold {size:,} bytes, more than the file")
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"the content of its record '{damaged}' does not match its checksum")
    except Exception as error:  # zipfile raises many types
        raise CheckpointError(f"'{path}' is damaged: {error}") from error


def _unpickle(file: io.BufferedReader, path: str, map_location: Any) -> Any:
    try:
        return torch.load(file, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it needs {name[1]}" if name else "its pickle is not plain"
        # Not chained: torch's message recommends loading without protection.
        raise CheckpointError(
            f"'{path}' is refused: {reason}. Only tensors and plain Python values are accepted, because anything "
            "else runs code from the file. If you trust it, convert it by tools/convert_checkpoint.py"
        ) from None
    except Exception as error:  # torch raises many types on damaged archives
        reason = str(error).partition(". ")[0] or "it is empty, or ends too early"
        if "pickle protocol" in reason:  # another program has written it
            reason += ". If you trust it, convert it by tools/convert_checkpoint.py"
        raise CheckpointError(f"'{path}' is damaged or not a file of torch.save: {reason}") from error
