"""The copy of a state in host memory, which a thread writes during training."""

import ctypes
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, UntypedStorage

from trainkit.checkpoint.format import CheckpointFormat, TorchFormat
from trainkit.checkpoint.state import ordinary
from trainkit.utils.device import new_event, runs_ahead

_ALIGNMENT = 64  # bytes
_Address: TypeAlias = tuple[torch.device, int, int]  # device, address, number of bytes


class HostCopy:
    """Copies a state to host memory, without waiting for a device that runs ahead.

    Tensors that share memory share it in the copy too, so that a file holds them once.

    Args:
        state: the state to copy.
        memory: the memory of an earlier copy, to use it again; allocating takes several times as long as copying.
        format: the format that will write the copy; its ``prepare`` gives the tensors to copy.

    Attributes:
        memory: whether it is pinned -> one block for all tensors; tensors of a device are in the pinned block.

    Raises:
        TypeError: the format cannot store a value.
    """

    def __init__(
        self, state: Mapping[str, Any], memory: Mapping[bool, Tensor] = {}, format: CheckpointFormat | None = None
    ) -> None:
        # keeps each original alive: its address stays valid only while its memory is in use
        originals: dict[_Address, UntypedStorage] = {}
        tensors: list[tuple[Tensor, Tensor]] = []  # (copy, still without memory; original)

        def take(tensor: Tensor, path: str) -> Tensor:
            tensor = ordinary(tensor, path)
            if tensor.is_meta:
                return tensor
            if not _is_plain(tensor) or not (tensor.is_cpu or runs_ahead(tensor.device)):
                return tensor.to("cpu", copy=True)
            originals.setdefault(_address(tensor), tensor.untyped_storage())
            tensors.append((torch.empty(0, dtype=tensor.dtype), tensor))
            return tensors[-1][0]

        self._state = (format or TorchFormat()).prepare(state, take=take)
        self.memory: dict[bool, Tensor] = {}
        copies = self._copy_storages(originals, memory)
        for copy, tensor in tensors:
            copy.set_(copies[_address(tensor)], tensor.storage_offset(), tensor.size(), tensor.stride())
        self._arrivals = [
            new_event(device) for device in {device for device, _, _ in originals if device.type != "cpu"}
        ]

    def state(self) -> dict[str, Any]:
        """The copy; waits until it is complete."""
        for arrival in self._arrivals:
            arrival.synchronize()
        return self._state

    def _copy_storages(
        self, originals: Mapping[_Address, UntypedStorage], memory: Mapping[bool, Tensor]
    ) -> dict[_Address, UntypedStorage]:
        copies = {}
        for pinned in (False, True):  # pinned: tensors of a device, whose total size stays the same
            places, end = {}, 0
            for address in originals:
                if (address[0].type != "cpu") == pinned:
                    places[address] = end
                    end += -(-address[2] // _ALIGNMENT) * _ALIGNMENT
            if not places:
                continue
            block = memory.get(pinned)
            if block is None or len(block) < end:
                block = _new_memory(end, pinned)
            self.memory[pinned], whole = block, block.numpy()
            for address, place in places.items():
                _, start, size = address
                copy = torch.frombuffer(whole, dtype=torch.uint8, count=size, offset=place).untyped_storage()
                if pinned:
                    copy.copy_(originals[address], non_blocking=True)
                else:
                    # in one thread: on a busy machine copy_, which uses several threads, takes up to 20 times as long
                    ctypes.memmove(copy.data_ptr(), start, size)
                copies[address] = copy
        return copies


def _new_memory(size: int, pinned: bool) -> Tensor:
    if not pinned:
        return torch.empty(0, dtype=torch.uint8).set_(UntypedStorage(size + size // 4))  # the next state may be larger
    deterministic: Any = torch.utils.deterministic  # would fill the memory, all of which is written
    fills, deterministic.fill_uninitialized_memory = deterministic.fill_uninitialized_memory, False
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    finally:
        deterministic.fill_uninitialized_memory = fills


def _address(tensor: Tensor) -> _Address:
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is fully described by its memory, shape and strides."""
    is_view = tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and not tensor.is_quantized and not is_view and tensor.numel() > 0
