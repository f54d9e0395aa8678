"""The recent values of a scalar, at a constant cost per value."""

import math
from array import array
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch


class HistoryBuffer:
    """The last ``max_length`` values of a scalar, each with its iteration.

    Older values count only in ``global_avg``. Methods as in ``fvcore.common.history_buffer``, whose
    ``update`` becomes slower as it grows.
    """

    def __init__(self, max_length: int = 10_000) -> None:
        if max_length < 1:
            raise ValueError(f"max_length must be >= 1 value, got {max_length}")
        self._max_length = max_length
        # dropping old values moves all others, so they are dropped only when there are this many
        self._length_to_drop = 2 * max_length
        # arrays, since checkpoints copy them fast
        self._values = array("d")
        self._iterations = array("q")
        self._count = 0
        self._sum = 0.0
        # results of `smooth` since the last put: several writers ask for them at the same time
        self._smoothed: dict[int, tuple[float, int]] = {}

    def update(self, value: float, iteration: int | None = None) -> None:
        """Append a value; ``iteration`` defaults to the number of values before."""
        if iteration is None:
            iteration = self._count
        self.extend([value], [iteration])

    def extend(self, values: Sequence[float], iterations: Sequence[int]) -> None:
        """Append values, each with its iteration."""
        self._values.extend(values)
        self._iterations.extend(iterations)
        self._count += len(values)
        self._smoothed = {}
        # one after the other: the sum has the same bits as after single updates
        total = self._sum
        for value in values:
            total += value
        self._sum = total
        if len(self._values) >= self._length_to_drop:
            del self._values[: -self._max_length]
            del self._iterations[: -self._max_length]

    def latest(self) -> float:
        return self._values[-1]

    def latest_with_iter(self) -> tuple[float, int]:
        return self._values[-1], self._iterations[-1]

    def median(self, window_size: int) -> float:
        """The median of the last ``window_size`` values without those that are infinite or NaN.

        If none of them is finite, the newest value.
        """
        last = self._last(window_size)
        if not math.isfinite(sum(last)):  # fast; the sum of large values is infinite too
            finite = array("d", filter(math.isfinite, last))
            last = finite or last[-1:]
        ordered = sorted(last)
        middle = len(ordered) // 2
        if len(ordered) % 2 == 1:
            return ordered[middle]
        return (ordered[middle - 1] + ordered[middle]) / 2

    def count_not_finite(self, window_size: int) -> int:
        """The number of the last ``window_size`` values that are infinite or NaN."""
        last = self._last(window_size)
        if math.isfinite(sum(last)):
            return 0
        return len(last) - sum(map(math.isfinite, last))

    def smooth(self, window_iters: int) -> tuple[float, int]:
        """The median over the last ``window_iters`` iterations, and how many values it leaves out.

        See `median`. Without any finite value it is the newest value, and leaves out none.
        """
        if window_iters not in self._smoothed:
            length = self.count_within(window_iters)
            num_left_out = self.count_not_finite(length)
            if num_left_out == length:
                num_left_out = 0
            self._smoothed[window_iters] = (self.median(length), num_left_out)
        return self._smoothed[window_iters]

    def avg(self, window_size: int) -> float:
        """The mean of the last ``window_size`` values; infinite or NaN if one of them is."""
        last = self._last(window_size)
        return sum(last) / len(last)

    def global_avg(self) -> float:
        """The mean of all values ever, also of dropped ones.

        It is infinite or NaN from the first such value on.
        """
        return self._sum / self._count

    def values(self) -> list[tuple[float, int]]:
        """The stored ``(value, iteration)`` pairs, oldest first."""
        values = self._values[-self._max_length :]
        iterations = self._iterations[-self._max_length :]
        return list(zip(values, iterations, strict=True))

    def count_within(self, window_iters: int) -> int:
        """The number of values in the last ``window_iters`` iterations.

        The newest value is in the last one of them.
        """
        iterations = self._iterations
        length = min(len(iterations), self._max_length)
        before_window = iterations[-1] - window_iters  # the iteration
        if window_iters < length:
            # the usual case: one value per iteration
            oldest_inside = iterations[-window_iters]
            newest_outside = iterations[-window_iters - 1]
            if newest_outside <= before_window < oldest_inside:
                return window_iters
        newest_first = islice(reversed(iterations), length)
        for count, iteration in enumerate(newest_first):
            if iteration <= before_window:
                return count
        return length

    def state_dict(self) -> dict[str, Any]:
        """The stored ``values`` and ``iterations``, and ``count`` and ``sum`` of all values ever.

        Shape ``[N]``, float64 and int64.
        """
        # copies: an array cannot grow while NumPy shows its memory
        values = np.frombuffer(self._values)[-self._max_length :].copy()
        iterations = np.frombuffer(self._iterations, np.int64)[-self._max_length :].copy()
        return {
            "values": torch.from_numpy(values),
            "iterations": torch.from_numpy(iterations),
            "count": self._count,
            "sum": self._sum,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue like the buffer that gave ``state``.

        A shorter buffer takes the newest values.
        """
        values = state["values"]
        iterations = state["iterations"]
        count = int(state["count"])
        if values.dtype != torch.float64 or iterations.dtype != torch.int64:
            raise TypeError(f"got values {values.dtype}, iterations {iterations.dtype}")
        if values.ndim != 1 or values.shape != iterations.shape or count < len(values):
            shapes = f"{[*values.shape]} values and {[*iterations.shape]} iterations"
            raise ValueError(f"got {shapes} of {count}")
        self._values = array("d", values.numpy().tobytes())
        self._iterations = array("q", iterations.numpy().tobytes())
        self._count = count
        self._sum = float(state["sum"])
        self._smoothed = {}

    def _last(self, window_size: int) -> "array[float]":
        return self._values[-min(window_size, self._max_length) :]
