"""The next batch of any loader, and data that seem to end because a sample raised StopIteration."""

import traceback
from collections.abc import Iterator
from typing import Any


def next_batch(batches: Iterator[Any], end: Any) -> Any:
    """The next of ``batches``, or ``end`` if there is none.

    Raises:
        RuntimeError: what reads a sample raised StopIteration, which a loader passes on as if it had ended.
    """
    try:
        return next(batches)
    except StopIteration as error:
        refuse_end_by_sample(error)
        return end


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
