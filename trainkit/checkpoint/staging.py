"""The copy of a state in host memory that a thread writes while training goes on."""

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from trainkit.checkpoint.state import plain_state
from trainkit.utils.device import new_event, runs_ahead

_ALIGNMENT = 64  # bytes


class HostCopy:
    """Copies a state; from a device that runs ahead, without waiting for it.

    Tensors that share their memory share it in the copy too, so that a file holds them once.

    Args:
        state: what is copied.
        memory: that of an earlier copy which nobody needs any more. Fresh memory costs several times the copying.

    Attributes:
        memory: one block for all tensors, pinned if a device copies into it.

    Raises:
        TypeError: as `plain_state`.
    """

    def __init__(self, state: Mapping[str, Any], memory: Tensor | None = None) -> None:
        # the original of each copy is held: an address says which memory is meant as long as that is not given back
        self._originals: dict[tuple[torch.device, int, int], UntypedStorage] = {}
        self._tensors: list[tuple[Tensor, Tensor]] = []  # (the copy, still without memory; the original)
        self._state = plain_state(dict(state), take_tensor=self._take)
        copies = self._copy_storages(memory)
        for copy, tensor in self._tensors:
            copy.set_(copies[_address(tensor)], tensor.storage_offset(), tensor.size(), tensor.stride())
        devices = {device for device, _, _ in self._originals if device.type != "cpu"}
        self._originals.clear()
        self._tensors.clear()
        self._arrivals = [new_event(device) for device in devices]

    def state(self) -> dict[str, Any]:
        """The copy; waits until it has arrived."""
        for arrival in self._arrivals:
            arrival.synchronize()
        return self._state

    def _take(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        if not _is_plain(tensor) or not (tensor.is_cpu or runs_ahead(tensor.device)):
            return tensor.to("cpu", copy=True)
        self._originals.setdefault(_address(tensor), tensor.untyped_storage())
        copy = torch.empty(0, dtype=tensor.dtype)
        self._tensors.append((copy, tensor))
        return copy

    def _copy_storages(self, memory: Tensor | None) -> dict[tuple[torch.device, int, int], UntypedStorage]:
        places, size = {}, 0
        for address in self._originals:
            places[address] = size
            size += -(-address[2] // _ALIGNMENT) * _ALIGNMENT
        pinned = any(device.type != "cpu" for device, _, _ in self._originals)
        if memory is None or len(memory) < size or memory.is_pinned() < pinned:
            memory = _new_memory(size, pinned)
        self.memory, whole = memory, memory.numpy()
        copies = {}
        for address, original in self._originals.items():
            _, start, num_bytes = address
            copy = torch.frombuffer(whole, dtype=torch.uint8, count=num_bytes, offset=places[address]).untyped_storage()
            if original.device.type == "cpu":
                # in one thread: copy_ takes all of them and, where a core has other work, waits up to 20 times as long
                ctypes.memmove(copy.data_ptr(), start, num_bytes)
            else:
                copy.copy_(original, non_blocking=True)
            copies[address] = copy
        return copies


def _new_memory(size: int, pinned: bool) -> Tensor:
    if not pinned:
        return torch.empty(0, dtype=torch.uint8).set_(UntypedStorage(size))
    deterministic: Any = torch.utils.deterministic  # under which all new memory is filled; here all of it is written
    fills, deterministic.fill_uninitialized_memory = deterministic.fill_uninitialized_memory, False
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    finally:
        deterministic.fill_uninitialized_memory = fills


def _address(tensor: Tensor) -> tuple[torch.device, int, int]:
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def _is_plain(tensor: Tensor) -> bool:
    """Whether its memory, shape and strides are all there is to it."""
    is_view = tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and not tensor.is_quantized and not is_view and tensor.numel() > 0
