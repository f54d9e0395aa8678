"""One checkpoint file: tensors and plain Python values, which load without running code.

It has the format of ``torch.save``, a zip archive with a CRC for each record. ``torch.load``
ignores the CRCs, so `read_file` checks them.
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

from trainkit.checkpoint.atomic import replacing
from trainkit.checkpoint.errors import CheckpointError
from trainkit.utils.file_io import refuse_pipe

SUFFIX = ".pth"
_PICKLE = b"\x80"  # the first byte of a pickle
_IS_FOLDER = 0x10  # this bit of a record's attributes marks a folder

ORDINARY = (Tensor, torch.nn.Parameter)
"""The types of tensors that a file holds; compared exactly."""

Take = Callable[[Tensor, str], Tensor]
"""``take(tensor, path)`` returns what stands in the copy of a state in place of a tensor."""

# Types are compared exactly: numpy.float64 is a subclass of float, and loads only by running code.
_PLAIN = frozenset(
    [str, int, bool, float, complex, type(None), torch.Size, torch.dtype, torch.device]
)
_DICTS = (dict, collections.OrderedDict, collections.Counter)  # torch's MultiStepLR has a Counter


def write_file(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write ``state`` to ``path`` completely or not at all.

    Raises:
        TypeError: as `plain_state`.
        CheckpointError: the file cannot be written.
    """
    write_plain(plain_state(dict(state)), path)


def write_plain(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """`write_file` for a state that `plain_state` has returned."""
    with replacing(path) as output:
        torch.save(state, output)


def read_file(path: str | os.PathLike[str], map_location: Any = "cpu", kind: type = dict) -> Any:
    """Verify and read a checkpoint of trainkit, or another file of ``torch.save``.

    Args:
        kind: the type of the object in the file.

    Raises:
        CheckpointError: the file is missing or damaged, holds more than tensors and plain Python
            values, or is of another ``kind``.
    """
    try:
        refuse_pipe(path)
        with open(path, "rb") as file:
            begin = file.read(2)
            if begin == b"PK":
                _check_records(file)
            elif begin and not begin.startswith(_PICKLE):
                raise ValueError(f"it starts with {begin!r}, not as an archive or a pickle")
            file.seek(0)
            state = torch.load(file, map_location=map_location, weights_only=True)
    except OSError as error:
        raise CheckpointError(f"cannot read '{path}': {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        needed = name[1] if name else "more than plain values"
        # Not chained: torch's message recommends loading without protection.
        raise CheckpointError(
            f"'{path}' is refused: it needs {needed}. Only tensors and plain "
            "Python values are accepted; if you trust it, convert it by tools/convert_checkpoint.py"
        ) from None
    except Exception as error:  # zipfile and torch raise many types
        reason = str(error) or "it ends too early"
        raise CheckpointError(
            f"'{path}' is damaged or not a file of torch.save: {reason}"
        ) from error
    if not isinstance(state, kind):
        raise CheckpointError(f"'{path}' holds a {type(state).__name__}; a checkpoint is a dict")
    return state


def _check_records(file: BinaryIO) -> None:
    """Compare the records of a zip archive with their CRCs."""
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.external_attr & _IS_FOLDER:
                raise zipfile.BadZipFile(
                    "a record is marked as a folder, which torch.load leaves out without a word"
                )
        damaged = archive.testzip()
        if damaged:
            raise zipfile.BadZipFile(
                f"the content of its record '{damaged}' does not match its checksum"
            )


def plain_state(value: Any, path: str = "", take: Take | None = None) -> Any:
    """A copy of nested dicts, lists and tuples that is safe to write.

    Containers are new, tensors share memory.

    Args:
        path: of ``value`` in the whole state, such as ``optimizer.state[0]``.
        take: None: `ordinary`.

    Raises:
        TypeError: there is a value other than tensors and plain values; the message has its path.
    """
    if take is None:
        take = ordinary
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is bytes and value:  # torch's reader refuses empty bytes
        return value
    if isinstance(value, Tensor):
        return take(value, path)
    if isinstance(value, int):
        return int(value)  # an IntEnum
    if kind in (list, tuple):
        # fast, for the thousand numbers of a random state
        if _PLAIN.issuperset(map(type, value)):
            return kind(value)
        return kind([plain_state(item, f"{path}[{i}]", take) for i, item in enumerate(value)])
    if kind not in _DICTS:
        refuse(value, path)
    copy: Any = kind()
    for key, item in value.items():
        if type(key) is str and type(item) in _PLAIN:  # fast
            copy[key] = item
            continue
        if type(key) is not str:
            item_path = f"{path}[{key!r}]"
        elif path:
            item_path = f"{path}.{key}"
        else:
            item_path = key
        if type(key) not in _PLAIN:
            key = plain_state(key, item_path, take=refuse)  # a key is no tensor
        copy[key] = plain_state(item, item_path, take)
    if hasattr(value, "_metadata"):  # a module's state dict has the version of each submodule
        copy._metadata = value._metadata
    return copy


def ordinary(tensor: Tensor, path: str) -> Tensor:
    """The tensor as a file holds it, detached.

    Raises TypeError if it is of another type, such as a sharded one.
    """
    if type(tensor) not in ORDINARY:
        refuse(tensor, path)
    return tensor.detach() if tensor.requires_grad else tensor


def ordinary_or_divided(tensor: Tensor, path: str) -> Tensor:
    """For a format that writes sharded tensors too."""
    if hasattr(tensor, "full_tensor"):
        return tensor
    return ordinary(tensor, path)


class UnwritableError(TypeError):
    """A state holds something else than tensors and plain values, at ``path``."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


def refuse(value: object, path: str) -> Any:
    """Raises UnwritableError."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise UnwritableError(
        f"the state at '{path}' is {value!r:.80} of type {kind}; accepted: tensors and plain "
        "Python values",
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
        separate: paths of dicts whose entries are left out one by one, since they are states of
            different objects.
        take: as for `plain_state`, such as `ordinary`, or `ordinary_or_divided`.
        errors: gets one error for each entry that is left out.
        path: of ``state`` in the whole state.
    """
    kept: Any = type(state)()
    for key, value in state.items():
        value_path = f"{path}.{key}" if path else str(key)
        try:
            if value_path in separate and type(value) in _DICTS:
                kept[key] = writable_state(value, separate, take, errors, value_path)
            else:
                kept[key] = plain_state(value, value_path, take)
        except UnwritableError as error:
            errors.append(error)
    if hasattr(state, "_metadata"):
        kept._metadata = state._metadata
    return kept
