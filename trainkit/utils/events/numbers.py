"""Numbers of a device that are read later, without waiting when they are computed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from trainkit.utils.device import new_event, runs_ahead, wait_for


class _Stack(NamedTuple):
    """Values of one device and type in one tensor; if their device runs ahead, on the CPU."""

    places: list[int]  # of the values, in `Numbers`
    values: torch.Tensor  # [len(places)]
    arrived: Any  # the event to wait for before reading; None if the values are there already


class Numbers:
    """Values that are read together: one stack, one copy and one event per device and type.

    Args:
        values: floats, and tensors of shape ``[]``. Copies from a device that runs ahead start
            now, without waiting. The list is the result of ``read()``.
    """

    def __init__(self, values: list[Any]) -> None:
        self._values = values
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, value in enumerate(values):
            is_read_already = type(value) is float  # the usual case, which costs less to find out
            if not is_read_already and isinstance(value, torch.Tensor):
                groups.setdefault((value.device, value.dtype), []).append(place)
        self._stacks = []
        for places in groups.values():
            self._stacks.append(_start_copy(values, places))

    def read(self) -> Sequence[float]:
        """Wait for the copies; returns the numbers in the order of ``values``."""
        for places, values, arrived in self._stacks:
            if arrived is not None:
                wait_for(arrived)
            for place, number in zip(places, values.tolist(), strict=True):
                self._values[place] = float(number)
        return self._values


def _start_copy(values: list[Any], places: list[int]) -> _Stack:
    """Stack the tensors at ``places``, which are on one device, and start the copy to the CPU."""
    stack = torch.stack([values[place].detach() for place in places])
    if not runs_ahead(stack.device):
        return _Stack(places, stack, arrived=None)
    host = torch.empty(stack.shape, dtype=stack.dtype, device="cpu", pin_memory=True)
    host.copy_(stack, non_blocking=True)
    return _Stack(places, host, arrived=new_event(stack.device))
