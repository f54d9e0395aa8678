"""Numbers that are read later, and the thread that stores them and calls the writers."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from trainkit.utils.device import current_device_index, new_event, runs_ahead, use_device, wait_for


class Numbers:
    """Values that are read together: one stack, one copy and one event per device and type.

    Args:
        values: floats, and tensors of shape ``[]``. Copies from a device that runs ahead start now, without waiting.
    """

    def __init__(self, values: list[Any]) -> None:
        self._values, groups = values, dict[tuple[torch.device, torch.dtype], list[int]]()
        for place, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                groups.setdefault((value.device, value.dtype), []).append(place)
        self._copies = []
        for (device, dtype), places in groups.items():
            packed, arrived = torch.stack([values[place].detach() for place in places]), None
            if runs_ahead(device):
                host = torch.empty(packed.shape, dtype=dtype, device="cpu", pin_memory=True)
                packed, arrived = host.copy_(packed, non_blocking=True), new_event(device)
            self._copies.append((places, packed, arrived))

    def read(self) -> Sequence[float]:
        """Wait for the copies; returns the numbers in the order of ``values``."""
        for places, packed, arrived in self._copies:
            if arrived is not None:
                wait_for(arrived)
            for place, number in zip(places, packed.tolist(), strict=True):
                self._values[place] = float(number)
        return self._values


class Worker:
    """A pool of one worker: it waits for the device, exchanges metrics, stores them and calls the writers.

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
        """Store what waits in ``part``, then call ``call()`` with it as the open storage. Does not wait."""
        self._jobs.append(self._pool.submit(self._do, part, call))

    def _do(self, part: Any, call: Callable[[], object] | None) -> Any:
        with part:
            try:
                part.flush()
                if call is not None:
                    call()
                    part.flush()
            except BaseException as error:  # later jobs are done all the same
                self._error = self._error or error
        return part

    def collect(self, *, but: int = 0) -> None:
        """Wait for all jobs, ``but`` the newest ones."""
        if parts := [self._jobs.popleft().result() for _ in range(len(self._jobs) - but)]:
            self._storage.take_back(parts)

    def wait(self) -> None:
        """Wait for all jobs; raise the first error since the last call."""
        self.collect()
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the first error since the last call; does not wait."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        self._pool.shutdown()
