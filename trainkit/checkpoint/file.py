"""One checkpoint file: tensors and plain Python values, which load without running code.

It has the format of ``torch.save``, a zip archive with a CRC for each record. ``torch.load`` ignores the CRCs, so
`read_file` checks them.
"""

import collections
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Collection, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trainkit.checkpoint.atomic import CheckpointError, replacing
from trainkit.utils.file_io import refuse_pipe

SUFFIX = ".pth"
_FOLDER = 0x10  # the bit for folders in a record's attributes

ORDINARY = (Tensor, torch.nn.Parameter)
Take = Callable[[Tensor, str], Tensor]

# Types are compared exactly: numpy.float64 is a subclass of float, and loads only by running code.
_PLAIN = frozenset(
    [str, int, bool, float, complex, type(None), torch.Size, torch.dtype, torch.device]
)
_DICTS = (dict, collections.OrderedDict, collections.Counter)  # torch's MultiStepLR has a Counter


def plain_state(value: Any, path: str = "", take: Take | None = None) -> Any:
    """A copy of nested dicts, lists and tuples that is safe to write; containers are new, tensors share memory.

    ``take(tensor, path)`` returns the replacement of a tensor; None: `ordinary`.

    Raises:
        TypeError: there is a value other than tensors and plain values; the message has its path.
    """
    kind = type(value)
    if kind in _PLAIN or (kind is bytes and value):  # torch's reader refuses empty bytes
        return value
    if isinstance(value, Tensor):
        return (take or ordinary)(value, path)
    if isinstance(value, int):
        return int(value)  # an IntEnum
    if kind in (list, tuple):
        if _PLAIN.issuperset(map(type, value)):  # at once: a random state has a thousand numbers
            return kind(value)
        return kind([plain_state(item, f"{path}[{i}]", take) for i, item in enumerate(value)])
    if kind not in _DICTS:
        refuse(value, path)
    copy: Any = kind()
    for key, item in value.items():
        here = f"{path}[{key!r}]" if type(key) is not str else f"{path}.{key}" if path else key
        if type(key) not in _PLAIN:
            key = plain_state(key, here, refuse)
        copy[key] = plain_state(item, here, take)
    if hasattr(value, "_metadata"):  # a module's state dict has the version of each submodule
        copy._metadata = value._metadata
    return copy


def ordinary(tensor: Tensor, path: str) -> Tensor:
    """The tensor as a file holds it, detached. Raises TypeError if it is of another type, such as a sharded one."""
    if type(tensor) not in ORDINARY:
        refuse(tensor, path)
    return tensor.detach() if tensor.requires_grad else tensor


class UnwritableError(TypeError):
    """A state holds something else than tensors and plain values, at ``path``."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


def refuse(value: object, path: str) -> Any:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise UnwritableError(
        f"the state at '{path}' is {value!r:.80} of type {kind}; accepted: tensors and plain Python values",
        path,
    )


def writable_state(
    state: Mapping[str, Any],
    separate: Collection[str],
    take: Take,
    errors: list[UnwritableError],
    path: str = "",
) -> dict[str, Any]:
    """As `plain_state`, without the entries that a file cannot hold.

    Args:
        separate: paths of dicts whose entries are left out one by one, since they are states of different objects.
        take: as for `plain_state`, such as `ordinary`, or `ordinary_or_divided`.
        errors: gets one error for each entry that is left out.
    """
    kept: Any = type(state)()
    for key, value in state.items():
        here = f"{path}.{key}" if path else str(key)
        try:
            if here in separate and type(value) in _DICTS:
                kept[key] = writable_state(value, separate, take, errors, here)
            else:
                kept[key] = plain_state(value, here, take)
        except UnwritableError as error:
            errors.append(error)
    if hasattr(state, "_metadata"):
        kept._metadata = state._metadata
    return kept


def ordinary_or_divided(tensor: Tensor, path: str) -> Tensor:
    """For a format that writes sharded tensors too."""
    return tensor if hasattr(tensor, "full_tensor") else ordinary(tensor, path)


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
        refuse_pipe(path)
        with open(path, "rb") as file:
            if file.read(2) == b"PK":
                _check_records(file)
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
    return state


def _check_records(file: BinaryIO) -> None:
    """Compare the records of a zip archive with their CRCs."""
    with zipfile.ZipFile(file) as archive:
        if any(record.external_attr & _FOLDER for record in archive.infolist()):
            raise zipfile.BadZipFile(
                "a record is marked as a folder, which torch.load leaves out without a word"
            )
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(
                f"the content of its record '{damaged}' does not match its checksum"
            )
