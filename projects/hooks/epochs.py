"""Periods in epochs."""

from typing import Any

from trainkit.utils.periods import is_last, is_nth, periods_done


def is_due_epoch(trainer: Any, period: int, *, offset: int = 0, or_last: bool = False) -> bool:
    """Whether an action with this period in epochs is due; call it at the end of an epoch."""
    last = max(trainer.epoch + 1, periods_done(trainer.iter + 1, trainer.iters_per_epoch))
    ends = any(is_nth(epoch, period, offset) for epoch in range(trainer.epoch + 1, last + 1))
    return ends or (or_last and is_last(trainer))
