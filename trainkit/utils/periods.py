"""Numbers, and the one rule that says in which iterations periodic actions are due."""

import re
from fractions import Fraction
from typing import Any, TypeGuard

from trainkit.utils.errors import not_accepted


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is an int or a float, also inf or NaN, but no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object, minimum: int) -> TypeGuard[int]:
    """Whether ``value`` is an int of at least ``minimum``, but no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_in(value: object, interval: str) -> bool:
    """Whether ``value`` is a number in an interval such as "[0, inf)"; a round bracket excludes the end. NaN is not."""
    low, high = map(float, interval[1:-1].split(", "))
    if not is_number(value) or not low <= value <= high:
        return False
    is_excluded_end = (value == low and interval[0] == "(") or (
        value == high and interval[-1] == ")"
    )
    return not is_excluded_end


def check_number(name: str, value: Any, interval: str) -> Any:
    """``value``; raises ValueError if the argument ``name`` is not a number in ``interval``, see `is_in`."""
    if not is_in(value, interval):
        raise ValueError(f"{name} must be a number in {interval}, got {value!r}")
    return value


_TIME = re.compile(r"( *\d+(\.\d+)?(d|h|min|m|s))+")
_SECONDS = {"d": 86_400.0, "h": 3_600.0, "min": 60.0, "m": 60.0, "s": 1.0}


def parse_time(text: object, name: str) -> float:
    """The seconds of a text such as ``1d 12h`` or ``30min``. Raises ConfigError, with ``name``, for another value."""
    seconds = 0.0
    if isinstance(text, str) and _TIME.fullmatch(text):
        for number, unit in re.findall(r"([\d.]+)(d|h|min|m|s)", text):
            seconds += float(number) * _SECONDS[unit]
    if seconds <= 0:
        raise not_accepted(name, text, "a time above 0, such as 23h, 30min or 1d 12h")
    return seconds


class RoundedLength(int):
    """A number of iterations, at least 1, rounded from ``exact``; `is_nth` uses multiples of ``exact``."""

    exact: Fraction

    def __new__(cls, exact: Fraction | int) -> "RoundedLength":
        length = super().__new__(cls, max(round(exact), 1))
        length.exact = Fraction(exact)
        return length


def exact(length: int | Fraction) -> int | Fraction:
    """The length in iterations before it was rounded."""
    return getattr(length, "exact", length)


def whole_or_rounded(length: Fraction) -> int:
    """An int if ``length`` is whole, else a `RoundedLength`."""
    return length.numerator if length.denominator == 1 else RoundedLength(length)


def periods_done(done: int, period: int | Fraction, offset: int | Fraction = 0) -> int:
    """The largest ``n`` with ``round(offset + n * period) <= done``, 0 at the start; an epoch is a period too."""
    if type(period) is int and type(offset) is int:
        return (done - offset) // period
    period, offset = exact(period), exact(offset)
    # done + 1/2 - offset; ints are fast
    half = (2 * done + 1) * offset.denominator - 2 * offset.numerator
    n, rest = divmod(half * period.denominator, 2 * offset.denominator * period.numerator)
    n -= rest == 0 and done % 2  # round() goes from done + 1/2 to the even neighbour
    return n if done > 0 else min(n, 0)  # a period has at least one iteration


def is_nth(done: int, period: int | Fraction, offset: int | Fraction = 0) -> bool:
    """Whether a period ends after ``done`` iterations: at ``offset`` (if not 0), ``offset + period``, ..., rounded.

    A period of 0 or less never ends.
    """
    if period <= 0 or done <= 0:
        return False
    if type(period) is int and type(offset) is int:  # the usual case
        return (done - offset) % period == 0 and done >= offset
    n = periods_done(done, period, offset)
    return n >= (offset == 0) and n > periods_done(done - 1, period, offset)


def is_due(trainer: Any, period: int, *, offset: int = 0, or_last: bool = False) -> bool:
    """Whether an action is due after the current iteration: after every ``period``-th one; see `is_nth`."""
    return is_nth(trainer.iter + 1, period, offset) or (or_last and is_last(trainer))


def is_last(trainer: Any) -> bool:
    """Whether the current iteration is the last one of the run."""
    return trainer.iter + 1 >= trainer.max_iter


def check_period(name: str, period: int, *, minimum: int = 0) -> int:
    """Raises ValueError if the argument ``name`` is not a whole number, or less than ``minimum``."""
    if not is_whole(period, minimum):
        raise ValueError(f"{name} must be a whole number >= {minimum}, got {period!r}")
    return period


def say_done(done: int, max_iter: int | None = None) -> str:
    """The progress of a run in words: ``after 10 of 20 iterations``."""
    of_all = "" if max_iter is None else f" of {max_iter}"
    return f"after {done}{of_all} iteration{'s' * ((max_iter or done) != 1)}"
