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
    """The device of a config.

    ``"auto"`` is the accelerator that torch sees (CUDA, XPU, MPS), else the CPU.

    Raises:
        ValueError: torch does not know the name, or the machine does not have the device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return torch.device("cpu") if accelerator is None else accelerator
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f"no device is called {name!r}; accepted: auto, cpu, cuda, cuda:N, mps"
        ) from error
    if device.type in ("cpu", "meta"):
        return device
    count = 0
    if accelerator is not None and accelerator.type == device.type:
        count = torch.accelerator.device_count()
    index = 0 if device.index is None else device.index
    if index >= count:
        raise ValueError(f"there is no device {name!r}: torch sees {count} of type {device.type}")
    return device


def uuid_of(device: torch.device) -> str | None:
    """A name that no other device has, on any machine; None if it is none of CUDA and XPU."""
    if not runs_ahead(device):
        return None
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(properties.uuid)


def device_of(model: nn.Module) -> torch.device | None:
    """The device of the first parameter or buffer; None if ``model`` has neither."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        return tensor.device
    return None


def all_parameters(model: nn.Module) -> list[nn.Parameter]:
    """As ``model.parameters()``, which takes three times as long, since it looks for names.

    A parameter of several modules is there several times.
    """
    found: list[nn.Parameter | None] = []
    for module in model.modules():
        found += module._parameters.values()
    return [parameter for parameter in found if parameter is not None]


def all_tensors(model: nn.Module) -> list[torch.Tensor]:
    """All parameters and buffers, as `all_parameters`."""
    found: list[torch.Tensor | None] = []
    for module in model.modules():
        found += module._parameters.values()
        found += module._buffers.values()
    return [tensor for tensor in found if tensor is not None]


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside data-parallel wrappers; ``model`` itself if it has no wrapper."""
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    return model


def is_part_of(model: nn.Module, whole: nn.Module) -> bool:
    """Whether every parameter of ``model`` is one of ``whole``, as for a model and its wrapper."""
    return set(model.parameters()) <= set(whole.parameters())


@contextmanager
def preserve_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context that at its end restores the buffers of these modules.

    Also if a module has replaced them, but not those of modules inside them.
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
    """Whether the device works asynchronously, with streams and pinned memory.

    CUDA and XPU do, MPS does not.
    """
    return device.type in ("cuda", "xpu")


def accelerator_runs_ahead() -> bool:
    """Whether there is a device that `runs_ahead`; then ``torch.accelerator.memory`` works."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and runs_ahead(accelerator)


def new_event(device: torch.device) -> Any:
    """An event on the current stream of ``device``; a thread that waits for it sleeps."""
    event: Any
    if device.type == "cuda":
        event = torch.cuda.Event(blocking=True)
    else:
        event = torch.Event(device)
    stream = torch.accelerator.current_stream(device)  # of this device, maybe not the current one
    event.record(stream)
    return event


def wait_for(event: Any) -> None:
    """Wait for an event of `new_event`.

    Its device is the current one meanwhile: CUDA makes a context, of some 500 MB, on the current
    device of a thread that waits.
    """
    with torch.accelerator.device_index(event.device.index):
        event.synchronize()


def current_device_index() -> int | None:
    """The number of the current device, for `use_device` in a new thread.

    None if no device `runs_ahead`.
    """
    if not accelerator_runs_ahead():
        return None
    return torch.accelerator.current_device_index()


def use_device(index: int | None) -> None:
    """Make a device the current one of this thread; a new thread has device 0."""
    if index is not None:
        torch.accelerator.set_device_index(index)


def move_to_device(data: Any, device: torch.device) -> Any:
    """Move every tensor in nested mappings, lists, tuples and named tuples.

    An object with a method ``to(device)`` is moved by it. Copies from pinned memory do not block. A
    mapping whose class cannot be made from a dict becomes a dict.
    """
    if isinstance(data, torch.Tensor):
        if data.device == device:
            return data
        # a tensor that is not pinned is read before this returns
        return data.to(device, non_blocking=runs_ahead(device))
    if _moves_itself(data):
        return data.to(device)
    if isinstance(data, Mapping):
        items = {key: move_to_device(value, device) for key, value in data.items()}
        if type(data) is dict:
            return items
        try:
            return type(data)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if isinstance(data, list | tuple):
        moved = [move_to_device(value, device) for value in data]
        is_named_tuple = hasattr(data, "_fields")
        return type(data)(*moved) if is_named_tuple else type(data)(moved)
    return data


def _moves_itself(data: Any) -> bool:
    """Whether it is a user's own batch class, torch's PackedSequence or the like.

    Of a dict not: its ``to`` may wait for the device.
    """
    if isinstance(data, dict | UserDict):
        return False
    return callable(getattr(data, "to", None))
