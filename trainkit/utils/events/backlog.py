"""What was put into a storage by the loop, on its way through one worker thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

_MAX_CALLS = 1000  # where nobody publishes, memory must not grow and an error must not wait for the end


class Backlog:
    """Calls that one worker makes in the order in which the loop thread appended them.

    Appending costs a list append. A hand-over costs a thread switch (tens of microseconds), so it is made once per log
    period, not once per step. An exception does not keep later calls from being made; the first one is raised in
    the loop thread by the next ``raise_error`` or ``wait``.
    """

    def __init__(self, bind: Callable[[], None]) -> None:
        """``bind()`` is called in the worker before the calls of each hand-over."""
        self._bind = bind
        self._calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainkit-metrics")
        self._jobs: list[Future[None]] = []
        self._worker_id: int | None = None

    def append(self, call: Callable[..., None], *args: Any) -> None:
        self._calls.append((call, args))
        if len(self._calls) >= _MAX_CALLS:
            self.hand_over()

    def hand_over(self) -> None:
        """Let the worker make every call appended so far."""
        calls, self._calls = self._calls, []
        self._jobs.append(self._pool.submit(self._work, calls))

    def in_worker(self) -> bool:
        return threading.get_ident() == self._worker_id

    def raise_error(self) -> None:
        """Raise what went wrong in jobs that are done, without waiting for the others."""
        while self._jobs and self._jobs[0].done():
            self._jobs.pop(0).result()

    def wait(self) -> None:
        """Return when every call appended so far has been made; raise the first exception."""
        if self._calls:
            self.hand_over()
        wait(self._jobs)  # all of them, before one of them raises: a writer may be closed next
        self.raise_error()

    def close(self) -> None:
        """End the worker, after what it has been given."""
        self._pool.shutdown(wait=True)

    def _work(self, calls: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        self._worker_id = threading.get_ident()
        self._bind()
        error: Exception | None = None
        for call, args in calls:
            try:
                call(*args)
            except Exception as e:
                error = error or e
        if error is not None:
            raise error
