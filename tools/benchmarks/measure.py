"""Times ways to do the same work in alternating rounds, and makes a table of them."""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

Way = Callable[[], float]
"""Does the work once more, and returns its time in seconds (of one step, one save, one batch)."""


@dataclass(frozen=True)
class Comparison:
    """Ways to do one piece of work.

    Attributes:
        work: the work, in words.
        twin: does the work by hand, in a few lines that a reader can follow.
        found: way -> one value per round. The first way is the twin.
        unit: "s" or "MiB".
    """

    work: str
    twin: Callable[..., Any]
    found: Mapping[str, Sequence[float]]
    unit: str = "s"


def by_hand(twin: Callable[..., Any]) -> str:
    """The name of the way that is written by hand, with the place of its source."""
    module = twin.__module__.rpartition(".")[2]
    return f"by hand (`{module}.{twin.__qualname__}`)"


def compare(
    work: str, twin: Callable[..., Any], run_twin: Way, others: Mapping[str, Way], rounds: int
) -> Comparison:
    """Measure the twin and the other ways in alternating rounds."""
    found = alternate({by_hand(twin): run_twin, **others}, rounds)
    return Comparison(work, twin, found)


def alternate(ways: Mapping[str, Way], rounds: int) -> dict[str, list[float]]:
    """way -> its time in each round; every round calls each way once.

    A first round does not count: it fills caches and allocators. The order is reversed from round
    to round, because a way changes the state of the machine for the next one.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for _ in range(rounds + 1):
        for name in order:
            found[name].append(ways[name]())
        order.reverse()
    return {name: values[1:] for name, values in found.items()}


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """The ratio in each round, so that a slow round changes both sides of it."""
    return [value / other for value, other in zip(values, base, strict=True)]


def as_table(comparisons: Iterable[Comparison]) -> str:
    """A table in Markdown, with one line per way."""
    lines = []
    for comparison in comparisons:
        lines += _lines(comparison)
    headers = ["work", "way", "median", "ratio", "half of the ratios"]
    return tabulate(lines, headers, "github", disable_numparse=True)


def _lines(comparison: Comparison) -> list[list[str]]:
    lines = []
    work = comparison.work
    base = next(iter(comparison.found.values()))
    for name, values in comparison.found.items():
        median = format_value(statistics.median(values), comparison.unit)
        ratio = ""
        spread = ""
        if comparison.unit == "s":  # the memory of the twin may be 0
            by_round = ratios(values, base)
            ratio = f"{statistics.median(by_round):.2f}"
            if values is not base:
                low, high = middle_half(by_round)
                spread = f"{low:.2f} to {high:.2f}"
        lines.append([work, name, median, ratio, spread])
        work = ""  # it stands in the first line only
    return lines


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def format_value(value: float, unit: str) -> str:
    """Three digits, with a unit that fits: ``0.0123`` seconds is ``12.3 ms``."""
    if unit == "s" and value < 1e-3:
        value = value * 1e6
        unit = "us"
    elif unit == "s" and value < 1:
        value = value * 1e3
        unit = "ms"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def timed(action: Callable[[], object], before: Callable[[], object] = lambda: None) -> Way:
    """The way whose time is that of ``action``; ``before`` is called first, and not timed."""

    def run() -> float:
        before()
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    return run


def in_new_process(function: Callable[..., float], *arguments: Any) -> float:
    """Call a function where no memory has been freed that could be used again."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def resident_mib() -> float:
    """The memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def one_thread() -> Iterator[None]:
    """In this context torch computes in one thread: more threads make tiny models slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
