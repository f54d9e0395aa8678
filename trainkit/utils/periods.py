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
    """Whether ``value`` is a number in an interval such as "[0, inf)"; NaN is in none.

    A round bracket excludes the end.
    """
    if not is_number(value):
        return False
    low, high = interval[1:-1].split(", ")
    if interval.startswith("("):
        is_above_low = value > float(low)
    else:
        is_above_low = value >= float(low)
    if interval.endswith(")"):
        return is_above_low and value < float(high)
    return is_above_low and value <= float(high)


def check_number(name: str, value: Any, interval: str) -> Any:
    """Return ``value``.

    Raises:
        ValueError: the argument ``name`` is not a number in ``interval``, see `is_in`.
    """
    if not is_in(value, interval):
        raise ValueError(f"{name} must be a number in {interval}, got {value!r}")
    return value


_Period = TypeVar("_Period", bound="int | Period")
_TIME = re.compile(r"( *\d+(\.\d+)?(d|h|min|m|s))+")
_SECONDS = {"d": 86_400.0, "h": 3_600.0, "min": 60.0, "m": 60.0, "s": 1.0}


def parse_time(text: object, name: str) -> float:
    """The seconds of a text such as ``1d 12h`` or ``30min``.

    Raises:
        ConfigError: it is another value; the message has ``name``.
    """
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

    Its ends are rounded one by one, so they do not drift away from the ends of the epochs. Read it
    by `is_due`.
    """

    iterations: Fraction

    def __str__(self) -> str:
        return f"{float(self.iterations):.4g} iterations"


Length: TypeAlias = int | Fraction | Period
"""A number of iterations. A period in a config that is not whole is a `Period`; the length of an
epoch is a Fraction."""


def as_period(iterations: Fraction) -> int | Period:
    """An int if the number is whole."""
    if iterations.denominator == 1:
        return iterations.numerator
    return Period(iterations)


def iterations_of(length: Length) -> int | Fraction:
    """The length as a number, not rounded."""
    if isinstance(length, Period):
        return length.iterations
    return length


def round_length(length: Length) -> int:
    """The nearest number of iterations, at least 1 unless the length is 0."""
    exact = iterations_of(length)
    if exact == int(exact):
        return int(exact)
    return max(round(exact), 1)


def periods_done(done: int, period: Length, offset: Length = 0) -> int:
    """The largest ``n`` with ``round(offset + n * period) <= done``, 0 at the start.

    An epoch is a period too.
    """
    if type(period) is int and type(offset) is int:  # the usual case
        return (done - offset) // period
    length = iterations_of(period)
    start = iterations_of(offset)
    # round(x) <= done if x <= done + 1/2. So n is (done + 1/2 - start) / length, rounded down.
    # With integers, of numerator and denominator, since Fractions are slow.
    numerator = (2 * done + 1) * start.denominator - 2 * start.numerator
    numerator *= length.denominator
    denominator = 2 * start.denominator * length.numerator
    n, rest = divmod(numerator, denominator)
    # round(done + 1/2) is the even neighbour, so it is above an odd number
    ends_halfway = rest == 0
    if ends_halfway and done % 2 == 1:
        n -= 1
    if done <= 0:
        return min(n, 0)  # a period has at least one iteration
    return n


def is_nth(done: int, period: Length, offset: Length = 0) -> bool:
    """Whether a period ends after ``done`` iterations.

    Periods end after ``offset`` (if it is not 0), ``offset + period``, ... iterations, rounded. A
    period of 0 or less never ends.
    """
    if type(period) is int and type(offset) is int:  # the usual case
        return period > 0 and done > 0 and done >= offset and (done - offset) % period == 0
    if iterations_of(period) <= 0 or done <= 0:
        return False
    n = periods_done(done, period, offset)
    smallest = 1 if offset == 0 else 0
    return n >= smallest and n > periods_done(done - 1, period, offset)


def is_due(trainer: Any, period: Length, *, offset: Length = 0, or_last: bool = False) -> bool:
    """Whether an action is due after the current iteration: after every ``period``-th one.

    See `is_nth`.
    """
    if is_nth(trainer.iter + 1, period, offset):
        return True
    return or_last and is_last(trainer)


def is_last(trainer: Any) -> bool:
    """Whether the current iteration is the last one of the run."""
    return trainer.iter + 1 >= trainer.max_iter


def check_period(name: str, period: _Period, *, minimum: int = 0) -> _Period:
    """Return ``period``.

    Raises:
        ValueError: the argument ``name`` is no `Period`, and no whole number >= ``minimum``.
    """
    if isinstance(period, Period):
        return period
    if not is_whole(period, minimum):
        raise ValueError(f"{name} must be a whole number >= {minimum}, got {period!r}")
    return period  # type: ignore[return-value]  # mypy narrows it to int


def say_done(done: int, max_iter: int | None = None) -> str:
    """The progress of a run in words: ``after 10 of 20 iterations``."""
    if max_iter is None:
        number = done
        text = f"after {done}"
    else:
        number = max_iter
        text = f"after {done} of {max_iter}"
    return f"{text} iteration" if number == 1 else f"{text} iterations"
