"""The copy of a state in host memory, which a thread writes during training."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, UntypedStorage

from trainkit.checkpoint.file import ordinary
from trainkit.checkpoint.format import CheckpointFormat
from trainkit.utils.device import new_event, runs_ahead

BLOCK_SIZE = 1 << 28  # bytes; torch rounds pinned memory up to a power of two, so that one large block wastes much
_ALIGNMENT = 64  # bytes
_Address: TypeAlias = tuple[torch.device, int, int]  # device, address, number of bytes
_Memory: TypeAlias = Mapping[bool, Sequence[Tensor]]


class HostCopy:
    """Copies a state to host memory, without waiting for a device that runs ahead.

    Tensors that share memory share it in the copy too, so that a file holds them once.

    Args:
        state: the state to copy.
        memory: the memory of an earlier copy, to use it again; allocating takes several times as long as copying.
        format: the format that will write the copy; its ``prepare`` gives the tensors to copy.

    Attributes:
        memory: whether it is pinned -> blocks for all tensors; tensors of a device are in pinned blocks.

    Raises:
        TypeError: the format cannot store a value.
    """

    def __init__(
        self, state: Mapping[str, Any], memory: _Memory | None = None, format: CheckpointFormat | None = None
    ) -> None:
        memory = memory or {}
        # keeps each original alive: its address stays valid only while its memory is in use
        originals: dict[_Address, UntypedStorage] = {}
        tensors: list[tuple[Tensor, Tensor]] = []  # (copy, still without memory; original)
        taken: dict[int, tuple[Tensor, Tensor]] = {}  # id -> original and copy: a file holds an object once

        def take(tensor: Tensor, path: str) -> Tensor:
            if id(tensor) not in taken:
                taken[id(tensor)] = tensor, copy_of(ordinary(tensor, path))
            return taken[id(tensor)][1]

        def copy_of(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return tensor
            if not _is_plain(tensor) or not (tensor.is_cpu or runs_ahead(tensor.device)):
                return tensor.to("cpu", copy=True)
            originals.setdefault(_address(tensor), tensor.untyped_storage())
            tensors.append((torch.empty(0, dtype=tensor.dtype, device="cpu"), tensor))
            return tensors[-1][0]

        self._state = (format or CheckpointFormat()).prepare(state, take=take)
        self.memory: dict[bool, list[Tensor]] = {}
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
        self, originals: Mapping[_Address, UntypedStorage], memory: _Memory
    ) -> dict[_Address, UntypedStorage]:
        copies = {}
        for pinned in (False, True):  # pinned: tensors of a device, whose total size stays the same
            former = [*memory.get(pinned, ())]
            for places, size in _blocks([address for address in originals if (address[0].type != "cpu") == pinned]):
                block = former.pop(0) if former and len(former[0]) >= size else None
                if block is None:
                    room = size if pinned else size + size // 4  # the next state may be larger
                    block = torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                self.memory.setdefault(pinned, []).append(block)
                for address, place in places.items():
                    copy = torch.frombuffer(block.numpy(), dtype=torch.uint8, count=address[2], offset=place)
                    copies[address] = copy.untyped_storage()
                    copies[address].copy_(originals[address], non_blocking=pinned)
        return copies


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
    return tensor.layout is torch.strided and not tensor.is_quantized and not is_view and tensor.numel() > 0
