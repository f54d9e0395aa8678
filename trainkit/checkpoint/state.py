"""The values that a checkpoint may hold: tensors and plain Python values, which load without running code."""

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

ORDINARY = (Tensor, torch.nn.Parameter)
Take = Callable[[Tensor, str], Tensor]

_PLAIN_TYPES = frozenset([str, bool, float, complex, type(None), torch.Size, torch.dtype, torch.device])
_KEY_TYPES = frozenset([str, int, float, bool])
_DICTS = (dict, collections.OrderedDict, collections.Counter)  # torch's MultiStepLR has a Counter
_MAX_INT_BITS = 2000  # torch's reader refuses larger ints


def plain_state(value: Any, path: str = "", take: Take | None = None, take_other: Take | None = None) -> Any:
    """A copy of ``value`` that is safe to write; containers are new, tensors share memory with the originals.

    Tensors are detached. A tensor that uses only a part of its storage is cloned, because the file would hold the whole
    storage.

    Args:
        value: nested dicts, lists and tuples of tensors and plain values.
        path: the path of ``value`` in the state, for the error message.
        take: called with each tensor and its path, returns its replacement.
        take_other: the same for tensors of other types; None: they are refused.

    Raises:
        TypeError: there is a value of another type; the message has its path.
    """
    # Types are compared exactly: numpy.float64 is a subclass of float, and loads only by running code.
    kind = type(value)
    if kind in _PLAIN_TYPES or (kind is bytes and value):  # torch's reader refuses empty bytes
        return value
    if isinstance(value, int) and value.bit_length() <= _MAX_INT_BITS:
        return int(value)  # converts an IntEnum or a rounded length
    if kind in ORDINARY:
        tensor = _compact(value.detach())
        return tensor if take is None else take(tensor, path)
    if take_other is not None and isinstance(value, Tensor):
        return take_other(value, path)
    if kind in (list, tuple):
        kinds = {*map(type, value)}
        if kinds <= _PLAIN_TYPES or (kinds == {int} and max(map(int.bit_length, value)) <= _MAX_INT_BITS):
            return kind(value)  # at once, since a random state has a thousand numbers
        return kind(plain_state(item, f"{path}[{i}]", take, take_other) for i, item in enumerate(value))
    if kind not in _DICTS:
        raise TypeError(_refusal(value, path))
    copy: Any = kind()
    for key, item in value.items():
        if type(key) is str and type(item) in _PLAIN_TYPES:
            copy[key] = item
            continue
        is_int = isinstance(key, int) and type(key) is not bool
        if type(key) not in _KEY_TYPES and not is_int:
            raise TypeError(
                f"the dict at '{path or '(top)'}' has the key {key!r} of type {_type_name(key)}; a checkpoint "
                "takes keys of type str, int, float and bool"
            )
        here = f"{path}[{key!r}]" if not isinstance(key, str) else f"{path}.{key}" if path else key
        copy[int(key) if is_int else key] = plain_state(item, here, take, take_other)
    metadata = getattr(value, "_metadata", None)  # a module's state dict has the version of each submodule
    if metadata is not None:
        copy._metadata = plain_state(metadata, f"{path}._metadata")
    return copy


def _compact(tensor: Tensor) -> Tensor:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    is_part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone() if is_part else tensor


def _refusal(value: object, path: str) -> str:
    what, remedy = f"{value!r:.80} of type {_type_name(value)}", "its state_dict(), or what it can be rebuilt from"
    if isinstance(value, int):
        what, remedy = f"an int of more than {_MAX_INT_BITS} bits", "it as a str"
    elif isinstance(value, bytes):
        what, remedy = "an empty bytes object", "None, or leave it out"
    elif isinstance(value, np.generic | np.ndarray):
        remedy = "value.item() of a NumPy scalar and torch.as_tensor(value) of an array"
    elif isinstance(value, Tensor):
        remedy = "value.as_subclass(torch.Tensor)"
    return (
        f"the state at '{path or '(top)'}' is {what}; a checkpoint takes tensors and plain Python values. Save {remedy}"
    )


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
