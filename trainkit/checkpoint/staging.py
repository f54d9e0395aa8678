"""The copy of a state in host memory that a thread writes while training goes on."""

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from trainkit.checkpoint.state import plain_state


class HostCopy:
    """Copies a state; from a CUDA device without waiting for it.

    Tensors that share their memory share it in the copy too, so that a file holds them once.

    Args:
        state: what is copied.
        memory: that of an earlier copy which nobody needs any more. What has the size is taken: fresh memory costs
            several times the copying.

    Attributes:
        memory: where the tensors of a CPU are now. The pinned memory of the others is kept by torch itself.

    Raises:
        TypeError: as `plain_state`.
    """

    def __init__(self, state: Mapping[str, Any], memory: Iterable[UntypedStorage] = ()) -> None:
        self.memory: list[UntypedStorage] = []
        self._free: dict[int, list[UntypedStorage]] = {}  # by size
        for storage in memory:
            self._free.setdefault(storage.nbytes(), []).append(storage)
        # With the original of each copy: an address says which memory is meant as long as that is not given back.
        self._storages: dict[tuple[torch.device, int, int], tuple[UntypedStorage, UntypedStorage]] = {}
        self._state = plain_state(dict(state), take_tensor=self._copy)
        devices = {device for device, _, _ in self._storages if device.type == "cuda"}
        self._storages.clear()
        self._free.clear()
        self._arrivals = [torch.cuda.current_stream(device).record_event() for device in devices]

    def state(self) -> dict[str, Any]:
        """The copy; waits until it has arrived."""
        for arrival in self._arrivals:
            arrival.synchronize()
        return self._state

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        if not _is_plain(tensor) or tensor.device.type not in ("cpu", "cuda"):
            return tensor.to("cpu", copy=True)
        storage = tensor.untyped_storage()
        address = (tensor.device, storage.data_ptr(), storage.nbytes())
        if address not in self._storages:
            self._storages[address] = (storage, self._copy_storage(storage))
        copy = torch.empty(0, dtype=tensor.dtype)
        return copy.set_(self._storages[address][1], tensor.storage_offset(), tensor.size(), tensor.stride())

    def _copy_storage(self, storage: UntypedStorage) -> UntypedStorage:
        if storage.device.type == "cuda":
            pinned = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True).untyped_storage()
            return pinned.copy_(storage, non_blocking=True)
        free = self._free.get(storage.nbytes())
        copy = free.pop() if free else UntypedStorage(storage.nbytes())
        self.memory.append(copy)
        # In one thread: torch's copy_ takes all of them and, where a core has other work, waits up to 20 times as long.
        ctypes.memmove(copy.data_ptr(), storage.data_ptr(), storage.nbytes())
        return copy


def _is_plain(tensor: Tensor) -> bool:
    """Whether its memory, shape and strides are all there is to it."""
    is_view = tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and not tensor.is_quantized and not is_view and tensor.numel() > 0
