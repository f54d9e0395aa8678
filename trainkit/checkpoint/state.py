"""What a checkpoint may hold: tensors and plain Python values, the things that load without running code."""

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainkit.utils.sharding import is_sharded

_PLAIN_TYPES = (str, bool, float, complex, type(None), torch.Size, torch.dtype, torch.device)
_KEY_TYPES = (str, int, float, bool)
_MAX_INT_BITS = 2000  # torch's reader refuses an int that the pickle stores with a four-byte length


def plain_state(
    value: Any,
    path: str = "",
    take_tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    take_shard: Callable[[Tensor, str], Tensor] | None = None,
) -> Any:
    """Return a copy of ``value`` that is safe to write; containers are new, tensors share memory with the originals.

    Tensors come back detached. One that shows only a part of its storage is cloned, because the file would
    otherwise hold the whole storage.

    Args:
        value: nested dicts, lists and tuples of tensors and plain values.
        path: where ``value`` stands in the state, for the error message.
        take_tensor: what stands for each tensor in the copy.
        take_shard: what stands for a sharded tensor, or for one on the meta device; gets its path as well. None: as for
            other tensors, and the former are refused.

    Raises:
        TypeError: something else is in it; the message names its path.
    """
    # Types are compared exactly: numpy.float64 is a subclass of float, and loads only by running code.
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return value
    if kind is int and value.bit_length() <= _MAX_INT_BITS:
        return value
    if kind is bytes and value:  # empty bytes are stored as a call, which torch's reader refuses
        return value
    if take_shard is not None and isinstance(value, Tensor) and (value.is_meta or is_sharded(value)):
        return take_shard(value.detach(), path)
    if kind in (Tensor, torch.nn.Parameter):
        return take_tensor(_compact(value.detach()))
    if kind in (list, tuple):
        return kind(plain_state(item, f"{path}[{i}]", take_tensor, take_shard) for i, item in enumerate(value))
    if kind in (dict, collections.OrderedDict, collections.Counter):  # a Counter: torch's MultiStepLR
        return _plain_dict(value, path, take_tensor, take_shard)
    raise TypeError(_refusal(value, path))


def _plain_dict(value: dict[Any, Any], path: str, take_tensor: Any, take_shard: Any) -> dict[Any, Any]:
    copy = type(value)()
    for key, item in value.items():
        if type(key) not in _KEY_TYPES:
            raise TypeError(
                f"the dict at '{path or '(top)'}' has the key {key!r} of type {_type_name(key)}; a checkpoint "
                "takes keys of type str, int, float and bool"
            )
        copy[key] = plain_state(item, _join(path, key), take_tensor, take_shard)
    metadata = getattr(value, "_metadata", None)  # of a module's state dict: the version of each submodule
    if metadata is not None:
        copy._metadata = plain_state(metadata, _join(path, "_metadata"))  # type: ignore[attr-defined]
    return copy


def _compact(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        return tensor.clone()
    return tensor


def _join(path: str, key: object) -> str:
    if not isinstance(key, str):
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key


def _refusal(value: object, path: str) -> str:
    kind = type(value)
    if kind is int:
        what, remedy = f"an int of more than {_MAX_INT_BITS} bits", "Save it as a str"
    elif kind is bytes:
        what, remedy = "an empty bytes object", "Save None, or leave it out"
    else:
        what = f"{_short(value)} of type {_type_name(value)}"
        if kind.__module__.partition(".")[0] == "numpy":
            remedy = "Save value.item() of a NumPy scalar and torch.as_tensor(value) of an array"
        elif isinstance(value, Tensor):
            remedy = "Save value.as_subclass(torch.Tensor)"
        else:
            remedy = "Save its state_dict(), or the numbers, strings, lists and dicts it can be rebuilt from"
    return f"the state at '{path or '(top)'}' is {what}; a checkpoint takes tensors and plain Python values. {remedy}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
