"""How an iteration of a run has failed, as its capsule says, and whether a replay has failed in the same way."""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from trainkit.utils.logger import printable

# what differs between two processes in the text of one error: addresses, process ids, the number of a loader worker,
# and the iteration and the rank that notice a failure
_OF_THE_PROCESS = re.compile(
    r"0x[0-9a-f]+|(?<=pid )\d+|(?<=pid\(s\) )[\d, ]+|(?<=worker process )\d+"
    r"|(?<=in iteration )\d+| \(on rank \d+\)$"
)
_FRACTION = re.compile(r"-?\d+\.\d+(e[-+]?\d+)?")


Comparison = Literal["not known", "has come back", "has not come back", "only here"]
"""Of the failure of the run with that of a replay."""


class Failure(NamedTuple):
    """An iteration that has ended with an error.

    Attributes:
        error: its type and its text.
        losses: those that the model has returned in this iteration; empty if it has not.
        rank: the process of the run that has recorded it.
        is_overtaken: whether the run was resumed, and has done this iteration.
    """

    iteration: int
    error: str
    losses: Mapping[str, float]
    rank: int = 0
    is_overtaken: bool = False


def failed_iteration(error: BaseException, iteration: int) -> int:
    """The iteration that has failed, if the error is raised in ``iteration``.

    A loss that is not finite may be noticed later: by asynchronous metrics, or in an exchange of the ranks.
    """
    named = re.search(r"not finite in iteration (\d+)", str(error))
    if isinstance(error, FloatingPointError) and named is not None:
        return min(int(named[1]), iteration)
    return iteration


def describe_error(error: BaseException) -> str:
    """The type and the text of an error."""
    return f"{type(error).__name__}: {error}"


def losses_of(trainer: Any) -> dict[str, float]:
    """The losses of the present iteration as numbers. Raises RuntimeError if there are none yet."""
    return {name: float(loss) for name, loss in trainer.losses.items()}


def without_process(error: str) -> str:
    """The text of an error without what differs between two processes."""
    if error.startswith("OutOfMemoryError: "):
        return "OutOfMemoryError"  # the text has the sizes of the memory of other processes
    return _OF_THE_PROCESS.sub("", error)


def compare_endings(
    run: Failure | None, here: Failure | None, done_by_run: int, is_exact: bool = True
) -> tuple[str, Comparison]:
    """Compare how a range of iterations has ended in the run and in a replay; None: it has not failed.

    Args:
        done_by_run: the last iteration that the run has done, as far as its files say.
        is_exact: whether the replay had the state of the run; otherwise losses may have other finite values.

    Returns:
        A text, which starts with DIFFERENT if they differ, and the comparison in a word.
    """
    if run is None:
        if here is None or here.iteration > done_by_run:
            return "", "not known"  # the run may have ended here without a word
        text = (
            f"DIFFERENT: the run has not failed in iteration {here.iteration}, and the replay has"
        )
        return f"{text}: {_short(here.error)}", "only here"
    text = f"DIFFERENT: it has not come back: in the run iteration {run.iteration} has ended with"
    text = f"{text} {_short(run.error)}"
    if here is None:
        return f"{text}; here it has not failed", "has not come back"
    if here.iteration != run.iteration:
        text = f"{text}; here iteration {here.iteration} has ended with {_short(here.error)}"
        return text, "has not come back"
    run_error = without_process(run.error)
    here_error = without_process(here.error)
    if _FRACTION.sub("", run_error) != _FRACTION.sub("", here_error):
        return f"{text}; here with {_short(here.error)}", "has not come back"
    others = []
    for name, loss in run.losses.items():
        found = here.losses.get(name)
        if repr(found) == repr(loss):  # repr shows every bit, and NaN equals NaN
            continue
        others.append(f"{name} is {found!r} here and {loss!r} in the run")
        if found is None or math.isfinite(found) != math.isfinite(loss):
            return f"{text}; here with the same error, but {others[-1]}", "has not come back"
    num_losses = len(run.losses)
    equal = f"{num_losses - len(others)} of {num_losses} losses equal those of the run"
    if is_exact and run_error != here_error:
        others.append(f"with {_short(here.error)}, and not with {_short(run.error)}")
    if is_exact and others:
        return f"DIFFERENT: it has come back, but {others[0]}", "has come back"
    return f"it has come back{f'; {equal}' if num_losses else ''}", "has come back"


def _short(error: str) -> str:
    """The first sentence, and the last line of a text of several lines; a stranger's file may have written it."""
    lines = error.strip().splitlines() or [""]
    text = f"{lines[0].partition('. ')[0]:.200}"
    if len(lines) > 1:
        text = f"{text} ... {lines[-1].partition('. ')[0]:.200}"
    return printable(text)
