"""What was put into a storage by the loop and is stored later."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any

_MAX_CALLS = 1000  # where nobody reads or publishes, memory must not grow and an error must not wait for the end


class Backlog:
    """Calls that are made later, in the order in which the loop thread appended them.

    Appending costs a list append. The calls are made in bulk at a hand-over, once per log period: in a row they cost a
    fraction of what they cost one by one between the operations of a step. The loop thread makes them itself until
    there is a worker (``start_worker``), whose thread switches cost tens of microseconds per hand-over.

    An exception does not keep later calls from being made; the first one is raised in the loop thread: at the hand-over
    itself, or if there is a worker by the next ``raise_error`` or ``wait``.

    Attributes:
        working_thread: the one that makes calls now.
    """

    def __init__(self, working: Callable[[], AbstractContextManager[None]]) -> None:
        """``working()`` is entered around the calls of each hand-over, by the thread that makes them."""
        self._working = working
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()  # somebody may read in another thread; appending needs none
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []
        self.working_thread: int | None = None

    def start_worker(self) -> None:
        """From now on one worker thread makes the calls; until ``close``."""
        if self._pool is None:
            self.hand_over()
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainkit-metrics")

    @property
    def has_worker(self) -> bool:
        return self._pool is not None

    def append(self, call: Callable[..., None], *args: Any) -> None:
        self._calls.append((call, args))
        if len(self._calls) >= _MAX_CALLS:
            self.hand_over()

    def hand_over(self) -> None:
        """Make every call appended so far, or let the worker begin with them."""
        with self._lock:
            calls = [self._calls.popleft() for _ in range(len(self._calls))]
            if self._pool is not None:
                self._jobs.append(self._pool.submit(self._make, calls))
            elif calls:
                self._make(calls)

    def is_working(self) -> bool:
        """Whether it is one of the calls that asks."""
        return self.working_thread is not None and self.working_thread == threading.get_ident()

    def raise_error(self) -> None:
        """Raise what went wrong in jobs that are done, without waiting for the others."""
        while self._jobs and self._jobs[0].done():
            self._jobs.pop(0).result()

    def wait(self) -> None:
        """Return when every call appended so far has been made; raise the first exception."""
        if self._calls or self._pool is None:  # without a worker another thread may be making them now
            self.hand_over()
        if self._jobs:
            wait(self._jobs)  # all of them, before one of them raises: a writer may be closed next
            self.raise_error()

    def close(self) -> None:
        """End the worker, after what it has been given."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _make(self, calls: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        error: Exception | None = None
        left = iter(calls)
        with self._working():
            self.working_thread = threading.get_ident()
            try:
                for call, args in left:
                    try:
                        call(*args)
                    except Exception as e:
                        error = error or e
            finally:
                self.working_thread = None
                self._calls.extendleft(reversed([*left]))  # Ctrl-C ends the loop, but not what is to be stored
        if error is not None:
            raise error
