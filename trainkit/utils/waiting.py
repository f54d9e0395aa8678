"""The next batch, and errors that look like the end of the data."""

import traceback
from collections.abc import Iterator
from typing import Any

POLL_SEC = 5.0  # interval of the checks on loader workers


def next_batch(batches: Iterator[Any], end: Any) -> Any:
    """The next of ``batches``, or ``end`` if there is no more batch.

    Raises:
        RuntimeError: reading a sample raised StopIteration, which a loader would treat as the end of the data.
    """
    try:
        return next(batches)
    except StopIteration as error:
        refuse_end_by_sample(error)
        return end


def refuse_end_by_sample(error: StopIteration) -> None:
    """
    Raises:
        RuntimeError: ``error`` comes from a ``__getitem__``, in this process or in a loader worker (then with its
            traceback). The normal end of an iterator does not.
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
