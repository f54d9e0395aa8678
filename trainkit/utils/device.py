"""Find devices by name, move data to a device, and look into a model."""

import itertools
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def resolve_device(name: str | torch.device) -> torch.device:
    """The device of a config: ``"auto"`` is the accelerator that torch sees (CUDA, XPU, MPS), else the CPU.

    Raises:
        ValueError: torch does not know the name, or the machine does not have the device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f"no device is called {name!r}; accepted: auto, cpu, cuda, cuda:N, mps"
        ) from error
    count = (
        torch.accelerator.device_count() if accelerator and accelerator.type == device.type else 0
    )
    if device.type not in ("cpu", "meta") and (device.index or 0) >= count:
        raise ValueError(f"there is no device {name!r}: torch sees {count} of type {device.type}")
    return device


def uuid_of(device: torch.device) -> str | None:
    """A name that no other device has, on any machine; None if it is none of CUDA and XPU."""
    if not runs_ahead(device):
        return None
    return str(torch.get_device_module(device).get_device_properties(device).uuid)


def device_of(model: nn.Module) -> torch.device | None:
    """The device of the first parameter or buffer; None if ``model`` has neither."""
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    return None if tensor is None else tensor.device


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside data-parallel wrappers; ``model`` itself if it has no wrapper."""
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    return model


def is_part_of(model: nn.Module, whole: nn.Module) -> bool:
    """Whether every parameter of ``model`` is a parameter of ``whole``, as for a model and its wrapper."""
    return {*map(id, model.parameters())} <= {*map(id, whole.parameters())}


@contextmanager
def preserve_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context that at its end restores the buffers of these modules, even if a module has replaced them.

    Not those of modules inside them.
    """
    saved = []
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            saved.append((module, name, buffer, buffer.clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in saved:
                buffer.copy_(value)
                setattr(module, name, buffer)


def runs_ahead(device: torch.device) -> bool:
    """Whether the device works asynchronously, with streams and pinned memory: CUDA and XPU, not MPS."""
    return device.type in ("cuda", "xpu")


def accelerator_runs_ahead() -> bool:
    """Whether there is a device that `runs_ahead`; ``torch.accelerator.memory`` then works for it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and runs_ahead(accelerator)


def new_event(device: torch.device) -> Any:
    """An event on the current stream of ``device``; a thread that waits for it sleeps."""
    event = torch.cuda.Event(blocking=True) if device.type == "cuda" else torch.Event(device)
    event.record(torch.accelerator.current_stream(device))  # not the stream of the current device
    return event


def wait_for(event: Any) -> None:
    """Wait for an event of `new_event`.

    Its device is the current one meanwhile: CUDA makes a context, of some 500 MB, on the current device of a thread
    that waits.
    """
    with torch.accelerator.device_index(event.device.index):
        event.synchronize()


def current_device_index() -> int | None:
    """The number of the current device, for `use_device` in a new thread; None if no device `runs_ahead`."""
    return torch.accelerator.current_device_index() if accelerator_runs_ahead() else None


def use_device(index: int | None) -> None:
    """Make a device the current one of this thread; a new thread has device 0."""
    if index is not None:
        torch.accelerator.set_device_index(index)


def move_to_device(data: Any, device: torch.device) -> Any:
    """Move every tensor in nested mappings, lists, tuples and named tuples, and every object with ``to(device)``.

    Copies from pinned memory do not block. A mapping whose class cannot be made from a dict becomes a dict.
    """
    if isinstance(data, torch.Tensor):  # tensors that are not pinned are read before this returns
        return data if data.device == device else data.to(device, non_blocking=runs_ahead(device))
    # a user's own batch class, or torch's PackedSequence; not dicts, because their `to` may wait for the device
    if not isinstance(data, dict | UserDict) and callable(getattr(data, "to", None)):
        return data.to(device)
    if isinstance(data, Mapping):
        items = {key: move_to_device(value, device) for key, value in data.items()}
        try:
            return items if type(data) is dict else type(data)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if isinstance(data, list | tuple):
        moved = [move_to_device(value, device) for value in data]
        return type(data)(*moved) if hasattr(data, "_fields") else type(data)(moved)
    return data
