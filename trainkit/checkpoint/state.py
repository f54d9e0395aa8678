"""The values that a checkpoint may hold: tensors and plain Python values, which load without running code."""

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ORDINARY = (Tensor, torch.nn.Parameter)
Take = Callable[[Tensor, str], Tensor]

# Types are compared exactly: numpy.float64 is a subclass of float, and loads only by running code.
_PLAIN = frozenset([str, int, bool, float, complex, type(None), torch.Size, torch.dtype, torch.device])
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
        return int(value)  # an IntEnum, or a length that was rounded
    if kind in (list, tuple):
        if _PLAIN.issuperset(map(type, value)):  # at once: a random state has a thousand numbers
            return kind(value)
        return kind([plain_state(item, f"{path}[{i}]", take) for i, item in enumerate(value)])
    if kind not in _DICTS:
        refuse(value, path)
    copy: Any = kind()
    for key, item in value.items():
        is_final = type(item) in _PLAIN or (take is None and type(item) is Tensor and not item.requires_grad)
        if is_final and type(key) in _PLAIN:
            copy[key] = item
            continue
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


def refuse(value: object, path: str) -> Any:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(f"the state at '{path}' is {value!r:.80} of type {kind}; accepted: tensors and plain Python values")
