"""Timing in alternating rounds, and the rows of the benchmark's table."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Runner = Callable[[], float]
"""Does its work once more; returns the seconds of one unit of it (a step, a save)."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: the measured quantity.
        value: in ``unit``, which is "x" for a ratio. None: not measured, ``note`` says why.
        goal: the largest value that is good enough; with ``at_least`` the smallest. None: there is no goal.
        sides: name of each compared side -> its median in seconds.
        note: a remark about the value, or why there is no value.
    """

    name: str
    value: float | None
    goal: float | None = None
    unit: str = "x"
    at_least: bool = False
    sides: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the goal is reached; None if there is no goal, or nothing was measured."""
        if self.value is None or self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}

    def as_texts(self) -> list[str]:
        """The cells of the line: name, value, goal, verdict, sides and note."""
        value = "not measured" if self.value is None else f"{self.value:.4g} {self.unit}"
        goal = (
            ""
            if self.goal is None
            else f"{'>=' if self.at_least else '<='} {self.goal:g} {self.unit}"
        )
        verdict = {None: "", True: "holds", False: "MISSED"}[self.holds]
        sides = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in self.sides.items())
        return [self.name, value, goal, verdict, "; ".join(filter(None, [sides, self.note]))]


def alternate(runners: Mapping[str, Runner], rounds: int) -> dict[str, list[float]]:
    """name -> the time of this runner in each round; every round calls each runner once.

    A first round does not count; it fills caches and allocators. The order is reversed from round to round, because a
    runner changes the state of the machine for the next runner.
    """
    found: dict[str, list[float]] = {name: [] for name in runners}
    order = list(runners)
    for _ in range(rounds + 1):
        for name in order:
            found[name].append(runners[name]())
        order.reverse()
    return {name: values[1:] for name, values in found.items()}


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of the ratios within each round. So a slowdown of a whole round does not matter."""
    return statistics.median(value / other for value, other in zip(values, base, strict=True))


def compare(
    name: str,
    found: Mapping[str, Sequence[float]],
    measured: str,
    base: str,
    goal: float | None = None,
    *,
    at_least: bool = False,
    note: str = "",
) -> Row:
    """The row for the ratio of ``measured`` to ``base`` in the times of `alternate`.

    Args:
        at_least: the goal is a speed and not a time, so the value is the ratio of ``base`` to ``measured``.
    """
    sides = {side: statistics.median(found[side]) for side in (measured, base)}
    value = ratio(found[base], found[measured]) if at_least else ratio(found[measured], found[base])
    return Row(name, value, goal, at_least=at_least, sides=sides, note=note)


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
