"""Numbers that are on a device until they are read, all together."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.utils.device import new_event, runs_ahead


class Numbers:
    """Values that are read together: one stack, one copy and one event per device and type.

    Args:
        values: floats, and tensors of shape ``[]``. Copies from a device that runs ahead start now, without waiting.
    """

    def __init__(self, values: list[Any]) -> None:
        self._values, groups = values, dict[tuple[torch.device, torch.dtype], list[int]]()
        for place, value in enumerate(values):
            if type(value) is not float:
                groups.setdefault((value.device, value.dtype), []).append(place)
        self._copies = [(places, *_start_copy([values[i] for i in places])) for places in groups.values()]

    def read(self) -> Sequence[float]:
        """Wait for the copies; returns the numbers in the order of ``values``."""
        for places, packed, arrived in self._copies:
            if arrived is not None:
                arrived.synchronize()
            for place, number in zip(places, packed.tolist(), strict=True):
                self._values[place] = float(number)
        return self._values


@torch.no_grad()
def _start_copy(tensors: Sequence[Tensor]) -> tuple[Tensor, Any]:
    packed = torch.stack([*tensors])
    if not runs_ahead(packed.device):
        return packed, None
    host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
    return host.copy_(packed, non_blocking=True), new_event(packed.device)
