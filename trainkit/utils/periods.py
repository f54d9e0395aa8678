"""Numbers, and the one rule that says in which iterations periodic actions are due."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias, TypeGuard, TypeVar

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


_Period = TypeVar("_Period", bound="int | Period")
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


@dataclass(frozen=True)
class Period:
    """A period, or the offset of one, that is not a whole number of iterations: a length in epochs.

    Its ends are rounded one by one, so they do not drift away from the ends of the epochs. Read it by `is_due`.
    """

    iterations: Fraction

    def __str__(self) -> str:
        return f"{float(self.iterations):.4g} iterations"


Length: TypeAlias = int | Fraction | Period
"""A number of iterations. A period in a config that is not whole is a `Period`; the length of an epoch a Fraction."""


def as_period(iterations: Fraction) -> int | Period:
    """An int if the number is whole."""
    return iterations.numerator if iterations.denominator == 1 else Period(iterations)


def iterations_of(length: Length) -> int | Fraction:
    """The length as a number, not rounded."""
    return length.iterations if isinstance(length, Period) else length


def round_length(length: Length) -> int:
    """The nearest number of iterations, at least 1 unless the length is 0."""
    exact = iterations_of(length)
    return int(exact) if exact == int(exact) else max(round(exact), 1)


def periods_done(done: int, period: Length, offset: Length = 0) -> int:
    """The largest ``n`` with ``round(offset + n * period) <= done``, 0 at the start; an epoch is a period too."""
    if type(period) is int and type(offset) is int:
        return (done - offset) // period
    period, offset = iterations_of(period), iterations_of(offset)
    # done + 1/2 - offset; ints are fast
    half = (2 * done + 1) * offset.denominator - 2 * offset.numerator
    n, rest = divmod(half * period.denominator, 2 * offset.denominator * period.numerator)
    n -= rest == 0 and done % 2  # round() goes from done + 1/2 to the even neighbour
    return n if done > 0 else min(n, 0)  # a period has at least one iteration


def is_nth(done: int, period: Length, offset: Length = 0) -> bool:
    """Whether a period ends after ``done`` iterations: at ``offset`` (if not 0), ``offset + period``, ..., rounded.

    A period of 0 or less never ends.
    """
    if type(period) is int and type(offset) is int:  # the usual case
        return period > 0 and done > 0 and (done - offset) % period == 0 and done >= offset
    if iterations_of(period) <= 0 or done <= 0:
        return False
    n = periods_done(done, period, offset)
    return n >= (offset == 0) and n > periods_done(done - 1, period, offset)


def is_due(trainer: Any, period: Length, *, offset: Length = 0, or_last: bool = False) -> bool:
    """Whether an action is due after the current iteration: after every ``period``-th one; see `is_nth`."""
    return is_nth(trainer.iter + 1, period, offset) or (or_last and is_last(trainer))


def is_last(trainer: Any) -> bool:
    """Whether the current iteration is the last one of the run."""
    return trainer.iter + 1 >= trainer.max_iter


def check_period(name: str, period: _Period, *, minimum: int = 0) -> _Period:
    """``period``; raises ValueError if the argument ``name`` is no `Period`, and no whole number >= ``minimum``."""
    if isinstance(period, Period):
        return period
    if not is_whole(period, minimum):
        raise ValueError(f"{name} must be a whole number >= {minimum}, got {period!r}")
    return period  # type: ignore[return-value]  # mypy narrows it to int


def say_done(done: int, max_iter: int | None = None) -> str:
    """The progress of a run in words: ``after 10 of 20 iterations``."""
    of_all = "" if max_iter is None else f" of {max_iter}"
    return f"after {done}{of_all} iteration{'s' * ((max_iter or done) != 1)}"
