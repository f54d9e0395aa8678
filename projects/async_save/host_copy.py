"""The copy of a state in host memory, which a thread writes during training."""

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, UntypedStorage

from trainkit.checkpoint.file import ordinary
from trainkit.checkpoint.format import CheckpointFormat
from trainkit.utils.device import new_event, runs_ahead, wait_for

# bytes; torch rounds pinned memory up to a power of two, so that one large block wastes much
BLOCK_SIZE = 1 << 28
_ALIGNMENT = 64  # bytes
_SMALL = 1 << 16  # bytes
_Address: TypeAlias = tuple[torch.device, int, int]  # device, address, number of bytes
_Memory: TypeAlias = Mapping[torch.device, Sequence[Tensor]]


class HostCopy:
    """Copies a state to host memory, without waiting for a device that runs ahead.

    Tensors that share memory share it in the copy too, so that a file holds them once.

    Args:
        state: the state to copy.
        memory: the memory of an earlier copy, to use it again; allocating takes several times as long as copying.
        format: the format that will write the copy; its ``prepare`` gives the tensors to copy.
        snapshot: copy on the device first, if it has memory to spare; another stream copies from there to the host, and
            the computation does not wait for it. Else the computation waits, until all is in host memory.

    Attributes:
        memory: device of the originals -> blocks for all tensors; pinned, unless the device is the CPU.

    Raises TypeError: the format cannot store a value.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        memory: _Memory | None = None,
        format: CheckpointFormat | None = None,
        snapshot: bool = False,
    ) -> None:
        originals: dict[_Address, UntypedStorage] = {}
        copies: dict[_Address, UntypedStorage] = {}
        pairs: list[tuple[Tensor, Tensor]] = []  # (copy, still without memory; original)
        # id -> original and copy: a file holds an object once. An original stays alive, since ids and addresses are
        # valid only for so long
        taken: dict[int, tuple[Tensor, Tensor]] = {}

        def take(tensor: Tensor, path: str) -> Tensor:
            if id(tensor) not in taken:
                taken[id(tensor)] = tensor, copy_of(ordinary(tensor, path))
            _, copy = taken[id(tensor)]
            return copy

        def copy_of(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return tensor
            is_on_device = tensor.is_cpu or runs_ahead(tensor.device)
            if not _is_plain(tensor) or not is_on_device:
                return tensor.to("cpu", copy=True)
            address = _address(tensor)
            is_shared = address in copies or address in originals
            if not is_shared and tensor.is_cpu and _is_all_of_small_memory(tensor, address):
                # to allocate a small one is faster than to find its place in a block
                copy = tensor.clone()
                copies[address] = copy.untyped_storage()
                return copy
            if not is_shared:
                originals[address] = tensor.untyped_storage()
            copy = torch.empty(0, dtype=tensor.dtype, device="cpu")
            pairs.append((copy, tensor))
            return copy

        self._state = (format or CheckpointFormat()).prepare(state, take=take)
        self.memory: dict[torch.device, list[Tensor]] = {}
        # (event after all copies of a device, what they read)
        self._arrivals: list[tuple[Any, object]] = []
        by_device: dict[torch.device, dict[_Address, UntypedStorage]] = {}
        for address, storage in originals.items():
            device, _, _ = address
            by_device.setdefault(device, {})[address] = storage
        for device, of_device in by_device.items():
            former = [*(memory or {}).get(device, ())]
            copies |= self._copy_storages(device, of_device, former, snapshot)
        for copy, tensor in pairs:
            storage = copies[_address(tensor)]
            copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def state(self) -> dict[str, Any]:
        """The copy; waits until it is complete."""
        for arrival, _ in self._arrivals:
            wait_for(arrival)
        self._arrivals.clear()
        return self._state

    def _copy_storages(
        self,
        device: torch.device,
        originals: Mapping[_Address, UntypedStorage],
        former: list[Tensor],
        snapshot: bool,
    ) -> dict[_Address, UntypedStorage]:
        is_pinned = device.type != "cpu"
        copies: dict[_Address, UntypedStorage] = {}
        blocks = _blocks(originals)
        room = _room(device) if is_pinned and snapshot else 0
        left = sum(size for _, size in blocks)
        to_host: list[tuple[Tensor, Tensor]] = []  # (part of a block, its copy on the device)
        self.memory[device] = []
        for places, size in blocks:
            if former and len(former[0]) >= size:
                block = former.pop(0)
            else:
                block = _new_block(size, is_pinned)
            self.memory[device].append(block)
            target = block
            # the last blocks: the others are copied while the computation waits, so they come first
            if left <= room:
                # what is free may be in small pieces
                with contextlib.suppress(torch.OutOfMemoryError):
                    target = torch.empty(size, dtype=torch.uint8, device=device)
                    to_host.append((block[:size], target))
            left -= size
            for address, place in places.items():
                original = torch.empty(0, dtype=torch.uint8, device=device).set_(originals[address])
                size_of_one = len(original)
                target[place : place + size_of_one].copy_(original, non_blocking=is_pinned)
                copy = torch.frombuffer(
                    block.numpy(), dtype=torch.uint8, count=size_of_one, offset=place
                )
                copies[address] = copy.untyped_storage()
        if is_pinned:
            stream = torch.Stream(device)
            stream.wait_stream(torch.accelerator.current_stream(device))
            with stream:
                for block, copied in to_host:
                    block.copy_(copied, non_blocking=True)
                self._arrivals.append((new_event(device), to_host))
        return copies


def _new_block(size: int, is_pinned: bool) -> Tensor:
    if not is_pinned:  # pinned ones have the same total size each time
        size += size // 4  # the next state may be larger
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)


def _room(device: torch.device) -> int:
    """The bytes that a process has never needed at once on its device, without a tenth of the device as a reserve."""
    memory = torch.accelerator.memory
    free, total = memory.get_memory_info(device)
    reserve = total // 10
    not_needed = memory.memory_reserved(device) - memory.max_memory_allocated(device)
    return free + not_needed - reserve


def _blocks(addresses: Iterable[_Address]) -> list[tuple[dict[_Address, int], int]]:
    """Where each storage goes in blocks of `BLOCK_SIZE`, and the size of each block; a larger storage has its own."""
    blocks: list[tuple[dict[_Address, int], int]] = []
    places: dict[_Address, int] = {}
    end = 0
    for address in addresses:
        _, _, size = address
        if places and end + size > BLOCK_SIZE:
            blocks.append((places, end))
            places = {}
            end = 0
        places[address] = end
        end += math.ceil(size / _ALIGNMENT) * _ALIGNMENT
    if places:
        blocks.append((places, end))
    return blocks


def _address(tensor: Tensor) -> _Address:
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is fully described by its memory, shape and strides."""
    is_view = tensor.is_conj() or tensor.is_neg()
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not is_view
        and tensor.numel() > 0
    )


def _is_all_of_small_memory(tensor: Tensor, address: _Address) -> bool:
    """Whether the memory at this address is small, and has nothing but the tensor's values in order."""
    _, _, size = address
    return size <= _SMALL and size == tensor.nbytes and tensor.is_contiguous()
