"""One checkpoint file: written whole or not at all, and verified before it is read.

Format: what ``torch.save`` writes, followed by a trailer of 52 bytes at the very end of the file::

    8 bytes   magic, b"TRAINKIT"
    4 bytes   version of the format, 1
    8 bytes   length of what comes before the trailer, in bytes
    32 bytes  SHA-256 of what comes before the trailer

(integers are unsigned and little-endian). The saved dict carries one more key, ``MARKER``, so that a file of
ours whose trailer is damaged or cut off does not pass for a plain file of ``torch.save``. ``torch.load`` and
fvcore's ``Checkpointer`` read the file as it is; readers here remove the marker. A file with neither trailer nor marker
comes from somewhere else and is read unverified.
"""

import contextlib
import difflib
import hashlib
import io
import os
import pickle
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainkit.checkpoint.atomic import CheckpointError, replacing
from trainkit.checkpoint.state import plain_state

SUFFIX = ".pth"
MARKER = "__trainkit_format__"

_VERSION = 1
_MAGIC = b"TRAINKIT"
_TRAILER = struct.Struct("<8sIQ32s")
_CHUNK = 1 << 20


def write_file(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write ``state`` to ``path``; whatever interrupts this, ``path`` is the old file or the complete new one.

    Raises:
        TypeError: ``state`` holds something else than tensors and plain Python values.
        CheckpointError: it cannot be written; nothing is left behind.
    """
    payload = {MARKER: _VERSION, **plain_state(dict(state))}
    with replacing(os.fspath(path)) as output:
        torch.save(payload, output)  # type: ignore[arg-type]  # it only needs write() and flush()
        output.commit()  # before the digest is asked for: the disk works while it is computed
        output.write(_TRAILER.pack(_MAGIC, _VERSION, output.size, output.digest()))


def read_file(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """Verify and read a checkpoint of ours, or read a plain file of ``torch.save``.

    Raises:
        CheckpointError: the file is missing, damaged, or holds other things than tensors and plain Python values.
    """
    path = os.fspath(path)
    with _opened(path) as file:
        verified = _check_digest(file, path)
        file.seek(0)
        state = _unpickle(file, path, map_location)
    if not isinstance(state, dict):
        raise CheckpointError(f"'{path}' holds a {type(state).__name__}; a checkpoint is a dict")
    if state.pop(MARKER, None) is not None and not verified:
        raise CheckpointError(f"'{path}' is damaged: its trailer with the digest is missing or cut off")
    return state


def verify(path: str | os.PathLike[str]) -> None:
    """Check that a file is complete and unchanged since it was written; a plain ``torch.save`` file only has to load.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = os.fspath(path)
    with _opened(path) as file:
        verified = _check_digest(file, path)
    if not verified:
        read_file(path)


def has_trailer(path: str | os.PathLike[str]) -> bool:
    """Whether a file says that it was written by :func:`write_file`; it is not verified."""
    try:
        with open(path, "rb") as file:
            return _read_trailer(file) is not None
    except OSError:
        return False


def is_file_of(folder: str, name: str) -> bool:
    """Whether this is the bare name of a file in the folder, and no link out of it; the file need not exist."""
    is_name = name.isprintable() and name not in (os.curdir, os.pardir) and os.path.basename(name) == name
    return is_name and os.path.dirname(os.path.realpath(os.path.join(folder, name))) == os.path.realpath(folder)


def sha256_of(path: str | os.PathLike[str]) -> str:
    """That of a whole file of any kind, in hexadecimal digits."""
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(_CHUNK):
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
    if not isinstance(error, FileNotFoundError):
        return str(error.strerror)
    folder, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(folder):
        return f"its folder '{folder}' does not exist"
    nearest = difflib.get_close_matches(name, os.listdir(folder), n=1, cutoff=0.4)
    return "no such file" + (f"; the nearest name there is '{nearest[0]}'" if nearest else "")


def _read_trailer(file: io.BufferedReader) -> tuple[int, int, bytes] | None:
    """Return (version, payload length, digest), or None for a file that does not end in a trailer."""
    size = file.seek(0, os.SEEK_END)
    if size < _TRAILER.size:
        return None
    file.seek(size - _TRAILER.size)
    magic, version, length, digest = _TRAILER.unpack(file.read(_TRAILER.size))
    return (version, length, digest) if magic == _MAGIC else None


def _check_digest(file: io.BufferedReader, path: str) -> bool:
    """Return whether the file has a trailer; raise if it has one that does not fit the rest."""
    trailer = _read_trailer(file)
    if trailer is None:
        return False
    version, length, digest = trailer
    if version != _VERSION:
        raise CheckpointError(
            f"'{path}' has format version {version}, read here is {_VERSION}; it is damaged, or use a newer trainkit"
        )
    payload = file.tell() - _TRAILER.size
    if length != payload:
        raise CheckpointError(f"'{path}' is damaged: it holds {payload:,} bytes, {length:,} were written")
    file.seek(0)
    sha256 = hashlib.sha256()
    _update(sha256, file, length)
    if sha256.digest() != digest:
        raise CheckpointError(f"'{path}' is damaged: its content does not match its digest")
    return True


def _update(sha256: "hashlib._Hash", file: io.BufferedReader, length: int) -> None:
    """Feed the next ``length`` bytes of ``file`` to ``sha256``."""
    while length:
        data = file.read(min(length, _CHUNK))
        if not data:
            return  # the file shrinks while it is read: the digest will tell
        sha256.update(data)
        length -= len(data)


def _unpickle(file: io.BufferedReader, path: str, map_location: Any) -> Any:
    try:
        return torch.load(file, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it needs {name[1]}" if name else "its pickle is not plain"
        # Not chained: torch's message recommends to load without protection.
        raise CheckpointError(
            f"'{path}' is refused: {reason}. Only tensors and plain Python values are accepted, because anything "
            "else runs code from the file"
        ) from None
    except Exception as error:  # torch raises many types on damaged archives
        reason = str(error).partition(". ")[0] or "it is empty, or ends too early"
        raise CheckpointError(f"'{path}' is damaged or not a file of torch.save: {reason}") from error
