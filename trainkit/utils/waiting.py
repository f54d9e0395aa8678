"""Waiting for the next batch: runs that are to stop meanwhile, and data that only seem to end."""

import time
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

POLL_SEC = 5.0  # how long one waits before anything is looked up


class Abandoned(BaseException):
    """The run is to stop, and leaves what it is doing. No Exception, as it may be raised while a dataset reads."""

    nothing_done = False  # whether all of its step is left to do


class Waiter:
    """Who waits for data here; this one cannot be asked to stop."""

    since: float | None = None  # ``time.monotonic()`` when it started to wait; None: it does not wait

    def look_up(self) -> None:
        """Called every `POLL_SEC` of a wait.

        Raises:
            Abandoned: it was asked to stop.
        """


_NOBODY = Waiter()
waiter: ContextVar[Waiter] = ContextVar("waiter", default=_NOBODY)  # of this thread


def next_batch(batches: Iterator[Any], end: Any) -> Any:
    """The next of ``batches``, or ``end`` if there is none.

    Raises:
        Abandoned: the run was asked to stop while it waited.
        RuntimeError: what reads a sample raised StopIteration, which a loader passes on as if it had ended.
    """
    waiting = waiter.get()
    waiting.since = time.monotonic()
    try:
        return next(batches)
    except StopIteration as error:
        refuse_end_by_sample(error)
        return end
    finally:
        waiting.since = None


def refuse_end_by_sample(error: StopIteration) -> None:
    """
    Raises:
        RuntimeError: ``error`` comes out of a ``__getitem__``, here or in a loader worker, whose traceback it then has
            as its text. What ends an iterator never does.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_name in ("__getitem__", "__getitems__"):
            owner, index = (frame.f_locals.get(name) for name in code.co_varnames[:2])
            raise RuntimeError(_message(f"sample {index} of {type(owner).__name__}")) from error
    if "in DataLoader worker process" in str(error):
        raise RuntimeError(f"{_message('a sample')}\n{error}") from error


def _message(name: str) -> str:
    return f"{name} raised StopIteration, which would end the data; raise another error, or catch it in the dataset"
