"""One checkpoint file, in the format of ``torch.save``: a zip archive with a CRC for each record.

``torch.load`` ignores the CRCs, so `read_file` checks them. Files of older versions have one more key, and some have a
digest after the archive; both are ignored.
"""

import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from trainkit.checkpoint.atomic import CheckpointError, replacing
from trainkit.checkpoint.state import plain_state

SUFFIX = ".pth"
_OLD_KEY = "__trainkit_format__"
_FOLDER = 0x10  # the bit for folders in a record's attributes


def write_file(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write ``state`` to ``path`` completely or not at all; raises TypeError as `plain_state`, and CheckpointError."""
    write_plain(plain_state(dict(state)), path)


def write_plain(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """`write_file` for a state that `plain_state` has returned."""
    with replacing(path) as output:
        torch.save(state, output)


def read_file(path: str | os.PathLike[str], map_location: Any = "cpu", kind: type = dict) -> Any:
    """Verify and read a checkpoint of trainkit, or a file of ``torch.save`` that holds another ``kind`` of object.

    Raises:
        CheckpointError: the file is missing or damaged, or holds more than tensors and plain Python values.
    """
    try:
        with open(path, "rb") as file:
            if file.read(2) == b"PK":
                _check_records(path)
            file.seek(0)
            state = torch.load(file, map_location=map_location, weights_only=True)
    except OSError as error:
        raise CheckpointError(f"cannot read '{path}': {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        # Not chained: torch's message recommends loading without protection.
        raise CheckpointError(
            f"'{path}' is refused: it needs {name[1] if name else 'more than plain values'}. Only tensors and plain "
            "Python values are accepted; if you trust it, convert it by tools/convert_checkpoint.py"
        ) from None
    except Exception as error:  # zipfile and torch raise many types
        raise CheckpointError(
            f"'{path}' is damaged or not a file of torch.save: {str(error) or 'it ends too early'}"
        ) from error
    if not isinstance(state, kind):
        raise CheckpointError(f"'{path}' holds a {type(state).__name__}; a checkpoint is a dict")
    if isinstance(state, dict):
        state.pop(_OLD_KEY, None)
    return state


def _check_records(path: str | os.PathLike[str]) -> None:
    """Compare the records of a zip archive with their CRCs."""
    with zipfile.ZipFile(path) as archive:
        if any(record.external_attr & _FOLDER for record in archive.infolist()):
            raise zipfile.BadZipFile("a record is marked as a folder, which torch.load leaves out without a word")
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"the content of its record '{damaged}' does not match its checksum")
