"""Functions in new processes, which import what they need again."""

import pickle
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from torch import multiprocessing


class Failed(RuntimeError):
    """What the function has raised in the new process, with its traceback."""


def check_importable(function: Callable[..., Any]) -> None:
    """Raises ValueError if another process cannot import the function.

    A ``functools.partial`` of a function that can be imported is accepted.
    """
    inner: Any = function
    while isinstance(inner, partial):
        inner = inner.func
    reason = ""
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        reason = str(error)
    if getattr(inner, "__module__", None) == "__main__":
        reason = "it is in the script that was started"
    if reason:
        raise ValueError(
            "make_trainer must be a function at the top of a module, since new processes import "
            f"it; got {inner!r}: {reason}"
        )


def call_in_new_process(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the function returns in a process that is started for it.

    Raises:
        Failed: it has raised an error, or the process has ended before it returned.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    # pickled here, so that an error of an import in the new process is reported too
    call = pickle.dumps((function, args, kwargs))
    process = context.Process(target=_call, args=(sender, call))
    process.start()
    sender.close()
    try:
        is_returned, value = receiver.recv()
    except EOFError:
        process.join()
        raise Failed(f"the process has ended with the exit code {process.exitcode}") from None
    process.join()
    if not is_returned:
        raise Failed(value)
    return value


def _call(sender: Connection, call: bytes) -> None:
    try:
        function, args, kwargs = pickle.loads(call)
        result = (True, function(*args, **kwargs))
    except BaseException:  # also the SystemExit of a job
        result = (False, traceback.format_exc())
    sender.send(result)
