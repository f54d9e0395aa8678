"""The thread that stores what was put and calls the writers."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from trainkit.utils.device import current_device_index, use_device


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
