"""The copy of a state in host memory, which a thread writes during training."""

import contextlib
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
        # keeps each original alive: its address stays valid only while its memory is in use
        originals: dict[torch.device, dict[_Address, UntypedStorage]] = {}
        tensors: list[tuple[Tensor, Tensor]] = []  # (copy, still without memory; original)
        # id -> original and copy: a file holds an object once
        taken: dict[int, tuple[Tensor, Tensor]] = {}

        def take(tensor: Tensor, path: str) -> Tensor:
            if id(tensor) not in taken:
                taken[id(tensor)] = tensor, copy_of(ordinary(tensor, path))
            return taken[id(tensor)][1]

        def copy_of(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return tensor
            if not _is_plain(tensor) or not (tensor.is_cpu or runs_ahead(tensor.device)):
                return tensor.to("cpu", copy=True)
            originals.setdefault(tensor.device, {}).setdefault(
                _address(tensor), tensor.untyped_storage()
            )
            tensors.append((torch.empty(0, dtype=tensor.dtype, device="cpu"), tensor))
            return tensors[-1][0]

        self._state = (format or CheckpointFormat()).prepare(state, take=take)
        self.memory: dict[torch.device, list[Tensor]] = {}
        # (event after all copies of a device, what they read)
        self._arrivals: list[tuple[Any, object]] = []
        copies: dict[_Address, UntypedStorage] = {}
        for device, of_device in originals.items():
            copies |= self._copy_storages(
                device, of_device, [*(memory or {}).get(device, ())], snapshot
            )
        for copy, tensor in tensors:
            copy.set_(
                copies[_address(tensor)], tensor.storage_offset(), tensor.size(), tensor.stride()
            )

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
        # pinned: their total size stays the same
        pinned, blocks = (
            device.type != "cpu",
            _blocks(originals),
        )
        room, left = _room(device) if pinned and snapshot else 0, sum(size for _, size in blocks)
        copies, to_host, self.memory[device] = {}, [], []
        for places, size in blocks:
            block = former.pop(0) if former and len(former[0]) >= size else None
            if block is None:
                room_on_host = size if pinned else size + size // 4  # the next state may be larger
                block = torch.empty(
                    room_on_host, dtype=torch.uint8, device="cpu", pin_memory=pinned
                )
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
                target[place : place + len(original)].copy_(original, non_blocking=pinned)
                copy = torch.frombuffer(
                    block.numpy(), dtype=torch.uint8, count=len(original), offset=place
                )
                copies[address] = copy.untyped_storage()
        if pinned:
            stream = torch.Stream(device)
            stream.wait_stream(torch.accelerator.current_stream(device))
            with stream:
                for block, copied in to_host:
                    block.copy_(copied, non_blocking=True)
                self._arrivals.append((new_event(device), to_host))
        return copies


def _room(device: torch.device) -> int:
    """The bytes that a process has never needed at once on its device, without a tenth of the device as a reserve."""
    memory = torch.accelerator.memory
    free, total = memory.get_memory_info(device)
    return free + memory.memory_reserved(device) - memory.max_memory_allocated(device) - total // 10


def _blocks(addresses: Iterable[_Address]) -> list[tuple[dict[_Address, int], int]]:
    """Where each storage goes in blocks of `BLOCK_SIZE`, and the size of each block; a larger storage has its own."""
    blocks: list[tuple[dict[_Address, int], int]] = []
    for address in addresses:
        if not blocks or blocks[-1][1] + address[2] > BLOCK_SIZE:
            blocks.append(({}, 0))
        places, end = blocks[-1]
        places[address] = end
        blocks[-1] = places, end + -(-address[2] // _ALIGNMENT) * _ALIGNMENT
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
