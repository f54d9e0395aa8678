"""Devices by name, and moving whatever a loader yields to one of them."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def resolve_device(name: str | torch.device) -> torch.device:
    """The device of a config: ``"auto"`` takes CUDA, then MPS, then the CPU.

    Raises:
        ValueError: torch does not know the name, or the machine lacks the device.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"no device is called {name!r}; use auto, cpu, cuda, cuda:N or mps") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {name!r} was asked for, but torch sees {torch.cuda.device_count()} CUDA devices; use auto or cpu"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device {name!r} was asked for, but torch sees no MPS device; use auto or cpu")
    return device


def device_of(model: nn.Module) -> torch.device | None:
    """The device of the first parameter or buffer; None if ``model`` has neither."""
    tensor = first_tensor(model)
    return None if tensor is None else tensor.device


def first_tensor(model: nn.Module) -> torch.Tensor | None:
    """The first parameter, else the first buffer; None if ``model`` has neither."""
    return next(itertools.chain(model.parameters(), model.buffers()), None)


def move_to_device(data: Any, device: torch.device, stream: "torch.cuda.Stream | None" = None) -> Any:
    """Move every tensor in nested mappings, lists, tuples and named tuples, and every object with ``to(device)``.

    Copies from pinned memory do not block. What is already there, and what is no tensor, is returned as it is.

    Args:
        stream: of CUDA, on which tensors are copied, for use on the current one, which has to wait for it.
    """
    if isinstance(data, torch.Tensor):
        if data.device == device:
            return data
        if stream is None or type(data) is not torch.Tensor or data.layout is not torch.strided or data.is_nested:
            return data.to(device, non_blocking=data.is_pinned())
        with torch.cuda.stream(stream):
            moved_tensor = data.to(device, non_blocking=True)  # also what is not pinned is read when this returns
        moved_tensor.record_stream(torch.cuda.current_stream(device))
        return moved_tensor
    if isinstance(data, Mapping):
        moved = {key: move_to_device(value, device, stream) for key, value in data.items()}
        return moved if type(data) is dict else _rebuild(data, moved)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(move_to_device(value, device, stream) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(move_to_device(value, device, stream) for value in data)
    if hasattr(data, "to") and callable(data.to):  # a user's own batch class, torch's PackedSequence
        return data.to(device)
    return data


class Prefetcher:
    """``move_to_device`` for a loop that runs ahead of its device: the next batch is copied while this one computes.

    On CUDA the copies have a stream of their own, and that of the computation waits for them on the device. It is the
    host that must not wait for the device. Nothing is drawn from a loader before its turn, so that what a loader says
    about its position is true.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def move(self, data: Any, device: torch.device) -> Any:
        if device.type != "cuda":
            return move_to_device(data, device)
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        moved = move_to_device(data, device, self._stream)
        torch.cuda.current_stream(device).wait_stream(self._stream)
        return moved


def _rebuild(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Keep the mapping's class where it can be made from a dict; a plain dict otherwise."""
    try:
        return type(original)(items)  # type: ignore[call-arg]
    except TypeError:
        return items
