"""The one rule for hooks that act periodically."""

from typing import Any

from trainkit.utils.numbers import is_whole
from trainkit.utils.periods import is_nth, periods_done


def is_due(trainer: Any, period: int, *, offset: int = 0, or_last: bool = False) -> bool:
    """Whether an action with this period is due after the current iteration.

    True after the iterations ``period - 1, 2 * period - 1, ...``; for ``offset`` see `is_nth`. With ``or_last`` also
    after the last iteration.
    """
    return is_nth(trainer.iter + 1, period, offset) or (or_last and is_last(trainer))


def is_due_epoch(trainer: Any, period: int, *, offset: int = 0, or_last: bool = False) -> bool:
    """Whether an action with this period in epochs is due at the end of an epoch that ends with this iteration; call it
    at the end of an epoch."""
    last = max(trainer.epoch + 1, periods_done(trainer.iter + 1, trainer.iters_per_epoch))
    ends = any(is_nth(epoch, period, offset) for epoch in range(trainer.epoch + 1, last + 1))
    return ends or (or_last and is_last(trainer))


def is_last(trainer: Any) -> bool:
    """Whether the current iteration is the last one of the run."""
    return trainer.iter + 1 >= trainer.max_iter


def check_period(name: str, period: int, *, minimum: int = 0) -> int:
    """Raises ValueError if the argument ``name`` is not a whole number of iterations, or less than ``minimum``."""
    if not is_whole(period, minimum):
        raise ValueError(f"{name} must be a whole number of iterations >= {minimum}, got {period!r}")
    return period
