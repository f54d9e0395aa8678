"""The recent values of one scalar, at a constant cost per value."""

from collections import deque
from itertools import islice


class HistoryBuffer:
    """The last ``max_length`` values of a scalar, each with its iteration; older ones only count in ``global_avg``.

    Methods as in ``fvcore.common.history_buffer``, whose ``update`` takes longer the more it holds.
    """

    def __init__(self, max_length: int = 10_000) -> None:
        if max_length < 1:
            raise ValueError(f"max_length must be >= 1 value, got {max_length}")
        self._data: deque[tuple[float, int]] = deque(maxlen=max_length)
        self._count = 0
        self._sum = 0.0

    def update(self, value: float, iteration: int | None = None) -> None:
        """Append a value; ``iteration`` defaults to the number of values so far."""
        self._data.append((value, self._count if iteration is None else iteration))
        self._count += 1
        self._sum += value

    def latest(self) -> float:
        return self._data[-1][0]

    def median(self, window_size: int) -> float:
        """The median of the last ``window_size`` values (of two middle ones, their mean); NaN if one of them is."""
        ordered = sorted(self._last(window_size))
        if any(value != value for value in ordered):  # sorting has put them anywhere
            return float("nan")
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

    def avg(self, window_size: int) -> float:
        """The mean of the last ``window_size`` values."""
        last = self._last(window_size)
        return sum(last) / len(last)

    def global_avg(self) -> float:
        """The mean of all values ever, also of those that are no longer held."""
        return self._sum / self._count

    def values(self) -> list[tuple[float, int]]:
        """The held ``(value, iteration)`` pairs, oldest first."""
        return list(self._data)

    def count_within(self, window_iters: int) -> int:
        """How many values the last ``window_iters`` iterations have, counted back from the newest value."""
        start = self._data[-1][1] - window_iters
        count = 0
        for _, iteration in reversed(self._data):
            if iteration <= start:
                break
            count += 1
        return count

    def _last(self, window_size: int) -> list[float]:
        return [value for value, _ in islice(reversed(self._data), window_size)]
