"""The one rule of all hooks that do something every so often."""

from typing import Any

from trainkit.utils.numbers import is_whole
from trainkit.utils.periods import is_nth, periods_done


def is_due(trainer: Any, period: int, *, offset: int = 0, or_last: bool = False) -> bool:
    """Whether something with this period happens after the current iteration.

    True after the iterations ``period - 1, 2 * period - 1, ...`` (with an offset, see `is_nth`, which counts them from
    1), with ``or_last`` also after the last one.
    """
    return is_nth(trainer.iter + 1, period, offset) or (or_last and is_last(trainer))


def is_due_epoch(trainer: Any, period: int, *, offset: int = 0, or_last: bool = False) -> bool:
    """Whether something with this period in epochs happens at the end of the current epoch, or of one of those that
    end with this iteration."""
    last = max(trainer.epoch + 1, periods_done(trainer.iter + 1, trainer.iters_per_epoch))
    ends = any(is_nth(epoch, period, offset) for epoch in range(trainer.epoch + 1, last + 1))
    return ends or (or_last and is_last(trainer))


def is_last(trainer: Any) -> bool:
    """Whether the current iteration is the last one of the run."""
    return trainer.iter + 1 >= trainer.max_iter


def check_period(name: str, period: int, *, minimum: int = 0) -> int:
    """
    Raises:
        ValueError: the argument called ``name`` is no whole number of iterations, or below ``minimum``.
    """
    if not is_whole(period, minimum):
        raise ValueError(f"{name} must be a whole number of iterations >= {minimum}, got {period!r}")
    return period
