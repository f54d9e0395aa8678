"""The values that a checkpoint may hold: tensors and plain Python values, which load without running code."""

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainkit.utils.sharding import is_sharded

_PLAIN_TYPES = (str, bool, float, complex, type(None), torch.Size, torch.dtype, torch.device)
_KEY_TYPES = (str, int, float, bool)
_MAX_INT_BITS = 2000  # torch's reader refuses larger ints


def plain_state(value: Any, path: str = "", take: Callable[[Tensor, str], Tensor] | None = None) -> Any:
    """A copy of ``value`` that is safe to write; containers are new, tensors share memory with the originals.

    Tensors are detached. A tensor that uses only a part of its storage is cloned, because the file would hold the whole
    storage.

    Args:
        value: nested dicts, lists and tuples of tensors and plain values.
        path: the path of ``value`` in the state, for the error message.
        take: called with each tensor and its path, returns its replacement. None: sharded tensors are refused.

    Raises:
        TypeError: there is a value of another type; the message has its path.
    """
    # Types are compared exactly: numpy.float64 is a subclass of float, and loads only by running code.
    kind = type(value)
    if kind in _PLAIN_TYPES or (kind is bytes and value):  # torch's reader refuses empty bytes
        return value
    if isinstance(value, int) and value.bit_length() <= _MAX_INT_BITS:
        return int(value)  # converts an IntEnum or a rounded length
    if kind in (Tensor, torch.nn.Parameter) or (take is not None and is_sharded(value)):
        tensor = _compact(value.detach())
        return tensor if take is None else take(tensor, path)
    if kind in (list, tuple):
        return kind(plain_state(item, f"{path}[{i}]", take) for i, item in enumerate(value))
    if kind not in (dict, collections.OrderedDict, collections.Counter):  # torch's MultiStepLR has a Counter
        raise TypeError(_refusal(value, path))
    copy: Any = kind()
    for key, item in value.items():
        is_int = isinstance(key, int) and type(key) is not bool
        if type(key) not in _KEY_TYPES and not is_int:
            raise TypeError(
                f"the dict at '{path or '(top)'}' has the key {key!r} of type {_type_name(key)}; a checkpoint "
                "takes keys of type str, int, float and bool"
            )
        here = f"{path}[{key!r}]" if not isinstance(key, str) else f"{path}.{key}" if path else key
        copy[int(key) if is_int else key] = plain_state(item, here, take)
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
