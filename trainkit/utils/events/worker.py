"""Numbers that are read later, and the thread that stores them and calls the writers."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from trainkit.utils.device import current_device_index, new_event, runs_ahead, use_device, wait_for


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


class Worker:
    """A pool of one worker, which stores metrics and calls the writers.

    It also waits for the device, and exchanges metrics with other ranks.

    Args:
        storage: gets back the images that no writer has cleared.
        initializer: called in the thread first.
    """

    def __init__(self, storage: Any, initializer: Callable[[], None]) -> None:
        device_index = current_device_index()

        def start() -> None:
            use_device(device_index)
            initializer()

        self._storage = storage
        self._pool = ThreadPoolExecutor(1, "trainkit-metrics", start)
        self._jobs: deque[Future[Any]] = deque()
        self._error: BaseException | None = None  # the first one since it was raised

    def submit(self, part: Any, call: Callable[[], object] | None = None) -> None:
        """Store what waits in ``part``, then call ``call()`` with it as the open storage.

        ``part`` is a storage of ``EventStorage.split_off``. Does not wait.
        """
        job = self._pool.submit(self._store_and_call, part, call)
        self._jobs.append(job)

    def _store_and_call(self, part: Any, call: Callable[[], object] | None) -> Any:
        with part:
            try:
                part.flush()
                if call is not None:
                    call()
                    part.flush()
            except BaseException as error:  # later jobs are done all the same
                if self._error is None:
                    self._error = error
        return part

    def collect(self, *, leave_newest: int = 0) -> None:
        """Wait for all jobs but the newest ``leave_newest``, and give their images back."""
        parts = []
        while len(self._jobs) > leave_newest:
            job = self._jobs.popleft()
            parts.append(job.result())
        if parts:
            self._storage.take_back_images(parts)

    def wait(self) -> None:
        """Wait for all jobs; raise the first error since the last call."""
        self.collect()
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the first error since the last call; does not wait."""
        error = self._error
        if error is not None:
            self._error = None
            raise error

    def close(self) -> None:
        self._pool.shutdown()
