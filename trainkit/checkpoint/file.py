"""One checkpoint file: written completely or not at all, and verified before it is read.

It has the format of ``torch.save``: a zip archive with a CRC for each record. ``torch.load`` ignores these CRCs, so the
readers here check them. The saved dict has one more key, ``MARKER``, which marks trainkit's files; readers here remove
it. Older trainkit files have a digest after the archive, which is ignored.
"""

import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch

from trainkit.checkpoint.atomic import CheckpointError, replacing
from trainkit.checkpoint.state import plain_state

SUFFIX = ".pth"
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


def read_file(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """Verify and read a checkpoint of trainkit or a plain file of ``torch.save``.

    Raises:
        CheckpointError: the file is missing or damaged, or holds more than tensors and plain Python values.
    """
    state = read_any(path, map_location)
    if not isinstance(state, dict):
        raise CheckpointError(f"'{path}' holds a {type(state).__name__}; a checkpoint is a dict")
    state.pop(MARKER, None)
    return state


def read_any(path: str | os.PathLike[str], map_location: Any = "cpu") -> Any:
    """Verify and read a file of ``torch.save`` that need not be a checkpoint. Raises CheckpointError as `read_file`."""
    try:
        with open(path, "rb") as file:
            if file.read(2) == b"PK":
                _check_records(file, path)
            file.seek(0)
            return torch.load(file, map_location=map_location, weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        # Not chained: torch's message recommends loading without protection.
        raise CheckpointError(
            f"'{path}' is refused: it needs {name[1] if name else 'more than plain values'}. Only tensors and plain "
            "Python values are accepted; if you trust it, convert it by tools/convert_checkpoint.py"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read '{path}': {error.strerror or error}") from error
    except Exception as error:  # torch raises many types on damaged archives
        reason = str(error).partition(". ")[0] or "it is empty, or ends too early"
        raise CheckpointError(f"'{path}' is damaged or not a file of torch.save: {reason}") from error


# errors of `peek_file`, or of reading its result, if the file is not a checkpoint of a trainer
UNREADABLE = (OSError, RuntimeError, ValueError, LookupError, TypeError, pickle.UnpicklingError)


def peek_file(path: str | os.PathLike[str]) -> Any:
    """The content of a checkpoint, not verified. The file is memory-mapped: only entries that are used are read."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def is_ours(path: str | os.PathLike[str]) -> bool:
    """Whether a file has the marker of `write_file`; the file is not verified."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("archive/data.pkl") as pickled:
            return MARKER.encode() in pickled.read(200)
    except Exception:  # zipfile raises many types
        return False


def _check_records(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    """Compare the records of a zip archive with their CRCs."""
    try:
        with zipfile.ZipFile(file) as archive:
            if any(record.external_attr & _FOLDER for record in archive.infolist()):
                raise zipfile.BadZipFile("a record is marked as a folder, which torch.load leaves out without a word")
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"the content of its record '{damaged}' does not match its checksum")
    except Exception as error:  # zipfile raises many types
        raise CheckpointError(f"'{path}' is damaged: {error}") from error
