"""The copy of a state in host memory that a thread writes while training goes on."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from trainkit.checkpoint.state import plain_state


class HostCopy:
    """Copies a state; from a CUDA device without waiting for it.

    Tensors that share their memory share it in the copy too, so that a file holds them once.

    Raises:
        TypeError: as `plain_state`.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        # With the original of each copy: an address says which memory is meant as long as that is not given back.
        self._storages: dict[tuple[torch.device, int, int], tuple[UntypedStorage, UntypedStorage]] = {}
        self._state = plain_state(dict(state), take_tensor=self._copy)
        devices = {device for device, _, _ in self._storages if device.type == "cuda"}
        self._storages.clear()
        self._arrivals = [torch.cuda.current_stream(device).record_event() for device in devices]

    def state(self) -> dict[str, Any]:
        """The copy; waits until it has arrived."""
        for arrival in self._arrivals:
            arrival.synchronize()
        return self._state

    def _copy(self, tensor: Tensor) -> Tensor:
        if not _is_plain(tensor) or tensor.device.type not in ("cpu", "cuda"):
            return tensor.to("cpu", copy=True)
        storage = tensor.untyped_storage()
        address = (tensor.device, storage.data_ptr(), storage.nbytes())
        if address not in self._storages:
            self._storages[address] = (storage, _copy_storage(storage))
        copy = torch.empty(0, dtype=tensor.dtype)
        return copy.set_(self._storages[address][1], tensor.storage_offset(), tensor.size(), tensor.stride())


def _is_plain(tensor: Tensor) -> bool:
    """Whether its memory, shape and strides are all there is to it."""
    is_view = tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and not tensor.is_quantized and not is_view and tensor.numel() > 0


def _copy_storage(storage: UntypedStorage) -> UntypedStorage:
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    host = torch.empty(data.shape, dtype=torch.uint8, pin_memory=data.is_cuda)
    return host.copy_(data, non_blocking=True).untyped_storage()
