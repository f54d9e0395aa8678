"""An axis: the position of a value on it, and its tick labels."""

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass

_MARGIN = 0.05  # fraction of the axis that stays free at both ends
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Axis:
    """An axis from ``low`` to ``high``, which differ; both are positive if it is logarithmic."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 at ``low``, 1 at ``high``."""
        low, value, high = (math.log10(v) if self.log else v for v in (self.low, value, self.high))
        return (value - low) / (high - low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Round values on the axis, at most ``most``, with their texts."""
        values = self._log_values(most) if self.log else self._linear_values(most)
        inner = [value for value in values if self.low <= value <= self.high]
        step = min((b - a for a, b in itertools.pairwise(inner)), default=0.0)
        return [(value, _text(value, value if self.log else step)) for value in inner]

    def _linear_values(self, most: int) -> list[float]:
        magnitude = 10.0 ** math.floor(math.log10((self.high - self.low) / most))
        for step in (factor * magnitude for factor in (1, 2, 5, 10, 20)):
            first, last = math.ceil(self.low / step), math.floor(self.high / step)
            if last - first < most:
                return [
                    round(i * step, 12) if step > 1e-9 else i * step for i in range(first, last + 1)
                ]
        return []

    def _log_values(self, most: int) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for every, factors in (
            (1, (1, 2, 5)),
            (1, (1, 3)),
            (1, (1,)),
            *((every, (1,)) for every in range(2, 20)),
        ):
            values = [factor * 10.0**decade for decade in decades[::every] for factor in factors]
            if sum(self.low <= value <= self.high for value in values) <= most:
                return values
        return []


def make_axis(values: Collection[float], *, log: bool = False, margin: float = _MARGIN) -> Axis:
    """An axis for all values, with some room at both ends."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if log:
        room = (high / low) ** margin
        return Axis(low / room, high * room, log=True)
    room = margin * (high - low) or 0.1 * abs(high) or 1.0
    return Axis(low - room, high + room)


def _text(value: float, step: float) -> str:
    """The value with enough digits to distinguish it from a value that is ``step`` away."""
    unit, name = next(
        ((u, n) for u, n in _UNITS if abs(value) >= (10 * u if u == 1e3 else u)), (1.0, "")
    )
    value, step = value / unit, step / unit
    if value == 0 or step == 0:
        return f"{value:g}{name}"
    exponent = math.floor(math.log10(abs(value)))
    digits = exponent - math.floor(math.log10(step)) + 1
    return f"{value:.{max(digits, exponent + 1, 1)}g}{name}"
