"""Schedules as functions of the iteration: ``schedule(t, base)`` is the value ``t`` iterations after its start.

``base`` is the base value: a learning rate, a weight decay, a momentum. ``length`` is the number of iterations of the
schedule, by default that of its entry in the config. A schedule with an end value reaches it in its last iteration,
``length - 1``, as in OpenMMLab, and keeps it; torch's ``total_iters`` is ``length - 1``. If torch has the same rule,
the values equal its closed form bit by bit.
"""

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from trainkit.utils.numbers import is_number, is_whole
from trainkit.utils.periods import exact, periods_done
from trainkit.utils.registry import Registry

Schedule: TypeAlias = Callable[[int, float], float]
Anneal: TypeAlias = Literal["cos", "linear"]

SCHEDULE_REGISTRY = Registry("SCHEDULE")
"""Classes and functions that return a `Schedule`. If a config gives no ``length``, it is that of the entry."""


_SHORTEST = {"warmup": 0, "begin": 0, "end": 0, "decay": 1, "step_size": 1, "timescale": 1}  # in iterations
_LISTS_OF_LENGTHS = ("milestones", "periods")
_NUMBERS = ("factor", "start_factor", "end_factor", "gamma", "pct_start", "end_value", "end_ratio")  # 0 or more
_ABOVE_0 = ("power", "div_factor", "final_div_factor")


class _Checked:
    """Checks each field by its name. Raises ValueError if a field is not accepted."""

    _shortest = 2  # iterations of a ``length``

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # a subclass is a dataclass
            name, value = field.name, getattr(self, field.name)
            if name == "length" or name in _SHORTEST:
                _check_length(name, value, _SHORTEST.get(name, self._shortest))
            elif name in _LISTS_OF_LENGTHS:
                if not isinstance(value, list | tuple):
                    raise ValueError(f"{name} must be a list of numbers of iterations, got {value!r}")
                for item in value:
                    _check_length(name, item, 1)
            elif name == "anneal":
                if value not in _ANNEAL:
                    raise ValueError(f"anneal must be one of {', '.join(_ANNEAL)}, got {value!r}")
            elif name in _ABOVE_0 or (name in _NUMBERS and value is not None):
                _check_number(name, value, is_0_accepted=name not in _ABOVE_0)


@SCHEDULE_REGISTRY.register()
@dataclass
class Constant(_Checked):
    """``factor`` times the base; in the last iteration the base itself, so that the next schedule starts with it."""

    length: int
    factor: float = 1 / 3

    def __call__(self, t: int, base: float) -> float:
        return base * (self.factor + (t >= self.length - 1) * (1 - self.factor))


@SCHEDULE_REGISTRY.register()
@dataclass
class Linear(_Checked):
    """A straight line from ``start_factor`` times the base to ``end_factor`` times the base; the usual warm-up."""

    length: int
    start_factor: float = 1 / 3
    end_factor: float = 1.0

    def __call__(self, t: int, base: float) -> float:
        last = self.length - 1
        return base * (self.start_factor + (self.end_factor - self.start_factor) * min(last, t) / last)


@SCHEDULE_REGISTRY.register()
@dataclass
class ExponentialWarmup(_Checked):
    """From ``factor`` times the base to the base; each iteration multiplies by the same number."""

    length: int
    factor: float = 1 / 3

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_number("factor", self.factor, is_0_accepted=False)

    def __call__(self, t: int, base: float) -> float:
        last = self.length - 1
        return base * self.factor ** (1 - min(last, t) / last)


@SCHEDULE_REGISTRY.register()
@dataclass
class Step(_Checked):
    """Multiply by ``gamma`` every ``step_size`` iterations."""

    step_size: int
    gamma: float = 0.1

    def __call__(self, t: int, base: float) -> float:
        return base * self.gamma ** periods_done(t, self.step_size)


@SCHEDULE_REGISTRY.register()
@dataclass
class MultiStep(_Checked):
    """Multiply by ``gamma`` at each of ``milestones``, in iterations from the start; a repeated one counts again."""

    milestones: Sequence[int]
    gamma: float = 0.1

    def __call__(self, t: int, base: float) -> float:
        return base * self.gamma ** sum(milestone <= t for milestone in self.milestones)


@SCHEDULE_REGISTRY.register()
@dataclass
class Exponential(_Checked):
    """Multiply by ``gamma`` in each iteration."""

    gamma: float

    def __call__(self, t: int, base: float) -> float:
        return base * self.gamma**t


@dataclass(kw_only=True)
class _HasEnd(_Checked):
    """The end as a value, or as a ratio of the base (for groups with different bases); default is 0."""

    end_value: float | None = None
    end_ratio: float | None = None

    def __post_init__(self) -> None:
        if self.end_value is not None and self.end_ratio is not None:
            raise ValueError(
                f"end_value {self.end_value!r} and end_ratio {self.end_ratio!r} both say where it ends; give one"
            )
        super().__post_init__()

    def end(self, base: float) -> float:
        return (self.end_value or 0.0) if self.end_ratio is None else base * self.end_ratio


@SCHEDULE_REGISTRY.register()
@dataclass
class Cosine(_HasEnd):
    """From the base to the end along half a period of a cosine.

    As in torch and OpenMMLab, iteration ``length`` has the end value; the last iteration is one earlier, so its value
    is a little above the end. After ``length`` the cosine rises again.
    """

    length: int
    _shortest = 1

    def __call__(self, t: int, base: float) -> float:
        end = self.end(base)
        return end + (base - end) * (1 + math.cos(math.pi * t / self.length)) / 2


@SCHEDULE_REGISTRY.register()
@dataclass
class CosineRestarts(_HasEnd):
    """Several `Cosine` in a row, of ``periods`` iterations each; the last value stays.

    Args:
        weights: each period starts at its weight times the base; default is 1 for all.
    """

    periods: Sequence[int]
    weights: Sequence[float] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.periods:
            raise ValueError(f"periods must have at least one number of iterations, got {self.periods!r}")
        if not isinstance(self.weights, list | tuple) or len(self.weights) not in (0, len(self.periods)):
            raise ValueError(f"weights must be a list, one for each of periods {self.periods!r}, got {self.weights!r}")
        for weight in self.weights:
            _check_number("weights", weight)

    def __call__(self, t: int, base: float) -> float:
        ends = [round(end) for end in accumulate(map(exact, self.periods))]
        t = min(t, ends[-1] - 1)
        i = bisect_right(ends, t)
        begin, weight = ends[i - 1] if i else 0, self.weights[i] if self.weights else 1.0
        end, period = self.end(base), ends[i] - begin
        return end + (base * weight - end) * (1 + math.cos(math.pi * (t - begin) / period)) / 2


@SCHEDULE_REGISTRY.register()
@dataclass
class Polynomial(_HasEnd):
    """From the base to the end by ``(1 - t / (length - 1)) ** power``."""

    length: int
    power: float = 1.0

    def __call__(self, t: int, base: float) -> float:
        last, end = self.length - 1, self.end(base)
        return (base - end) * (1.0 - min(last, t) / last) ** self.power + end


@SCHEDULE_REGISTRY.register()
@dataclass
class OneCycle(_Checked):
    """Up from ``base / div_factor`` to the base, and down to ``base / div_factor / final_div_factor``.

    The base is what torch calls ``max_lr``; each group has its own base. Smith and Topin, "Super-Convergence".

    Args:
        pct_start: fraction of the iterations in which it rises.
        three_phase: fall to the start value as fast as it rose, then to the end.
    """

    length: int
    pct_start: float = 0.3
    anneal: Anneal = "cos"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        peak = self.pct_start * self.length - 1
        most = (self.length - 1) / 2 if self.three_phase else self.length - 1
        if peak == 0 or peak >= most:
            raise ValueError(
                f"pct_start must leave room to rise and fall in the {self.length} iterations, got "
                f"{self.pct_start!r}, with which the top is in iteration {peak:g}"
            )

    def __call__(self, t: int, base: float) -> float:
        start = base / self.div_factor
        low = start / self.final_div_factor
        last = self.length - 1
        peak = float(self.pct_start * self.length) - 1
        ends, values = [peak, last], [start, base, low]
        if self.three_phase:
            ends, values = [peak, float(2 * self.pct_start * self.length) - 2, last], [start, base, start, low]
        t = min(t, last)
        i = next(i for i, end in enumerate(ends) if t <= end)
        begin = ends[i - 1] if i else 0.0
        return _ANNEAL[self.anneal](values[i], values[i + 1], (t - begin) / (ends[i] - begin))


@SCHEDULE_REGISTRY.register()
@dataclass
class InverseSquareRoot(_Checked):
    """``base * sqrt(timescale / (t + timescale))``; after a warm-up of ``timescale`` iterations it is the rule of
    Vaswani et al., "Attention Is All You Need"."""

    timescale: int

    def __call__(self, t: int, base: float) -> float:
        return base * math.sqrt(self.timescale / (t + self.timescale))


@SCHEDULE_REGISTRY.register()
@dataclass
class WarmupStableDecay(_HasEnd):
    """A linear rise from ``start_factor`` times the base to the base in ``warmup`` iterations, then the base, then a
    fall to the end value in ``decay`` iterations; Hu et al., "MiniCPM"."""

    length: int
    warmup: int
    decay: int
    start_factor: float = 0.0
    anneal: Anneal = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup + self.decay >= self.length:
            raise ValueError(
                f"warmup {self.warmup} and decay {self.decay} must be shorter than length {self.length} together"
            )

    def __call__(self, t: int, base: float) -> float:
        if t < self.warmup:
            return _linear(base * self.start_factor, base, t / self.warmup)
        decayed = min(t, self.length - 1) - (self.length - 1 - self.decay)
        return base if decayed <= 0 else _ANNEAL[self.anneal](base, self.end(base), decayed / self.decay)


@dataclass
class Segment(_Checked):
    """A schedule from iteration ``begin`` (included) to ``end`` (excluded)."""

    schedule: Schedule
    begin: int
    end: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end <= self.begin:
            raise ValueError(f"end must be after begin {self.begin}, got {self.end}")


@dataclass
class Chain:
    """The result of each segment is the base of the next one in the list.

    Before its start a segment does nothing; after its end its last value stays. So segments in a row continue each
    other, and overlapping ones, such as a warm-up and milestones, are multiplied.
    """

    segments: Sequence[Segment]

    def __call__(self, t: int, base: float) -> float:
        for segment in self.segments:
            if t >= segment.begin:
                base = segment.schedule(min(t, segment.end - 1) - segment.begin, base)
        return base


def compute_values(schedule: Schedule, t: int, bases: Iterable[float]) -> list[float]:
    """The value of each base; equal bases, such as those of many parameter groups, are computed once."""
    bases = list(bases)
    values = {base: schedule(t, base) for base in set(bases)}
    return [values[base] for base in bases]


def _cos(start: float, end: float, done: float) -> float:
    return end + (start - end) / 2.0 * (math.cos(math.pi * done) + 1)


def _linear(start: float, end: float, done: float) -> float:
    return (end - start) * done + start


_ANNEAL: dict[str, Callable[[float, float, float], float]] = {"cos": _cos, "linear": _linear}


def _check_length(name: str, value: Any, minimum: int) -> None:
    if not is_whole(value, minimum):
        raise ValueError(f"{name} must be a whole number of iterations >= {minimum}, got {value!r}")


def _check_number(name: str, value: Any, is_0_accepted: bool = True) -> None:
    if not is_number(value) or not math.isfinite(value) or value < 0 or (value == 0 and not is_0_accepted):
        raise ValueError(f"{name} must be a number {'>=' if is_0_accepted else '>'} 0, got {value!r}")
