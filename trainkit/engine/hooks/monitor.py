"""Is the newest value of a metric the best one so far?"""

import logging
import math
from difflib import get_close_matches
from typing import Any, Literal

from trainkit.utils.events import EventStorage

logger = logging.getLogger(__name__)


class MetricMonitor:
    """The best value of one metric, of which a hook asks after each evaluation.

    Args:
        metric: its name in the storage, such as ``classification/top1``.
        mode: whether "max" or "min" is better.
        min_delta: by how much a value must be better than the best to count.

    Raises:
        ValueError: another mode, or a negative ``min_delta``.
    """

    def __init__(self, metric: str, mode: Literal["max", "min"] = "max", min_delta: float = 0.0) -> None:
        if mode not in ("max", "min"):
            raise ValueError(f'mode must be "max" or "min", got {mode!r}')
        if min_delta < 0:
            raise ValueError(f"min_delta must be >= 0, got {min_delta}")
        self.metric, self.mode = metric, mode
        self._sign = 1 if mode == "max" else -1
        self._min_delta = min_delta
        self.forget()

    def forget(self) -> None:
        """Begin a new run."""
        self.best: float | None = None
        self.best_iter: int | None = None
        self._seen_iter: int | None = None

    def update(self, storage: EventStorage) -> bool | None:
        """True if there is a new best value, False if a new value is not better, None if there is no new value.

        A value that is not finite is never better.

        Raises:
            ValueError: the storage has no such metric.
        """
        latest = storage.latest()
        if self.metric not in latest:
            near = get_close_matches(self.metric, latest, n=1)
            raise ValueError(
                f"no evaluation has given the metric {self.metric!r}"
                + (f"; did you mean {near[0]!r}?" if near else "")
                + f" Known are: {', '.join(sorted(latest)) or 'none'}"
            )
        value, iter = latest[self.metric]
        if iter == self._seen_iter:
            return None
        self._seen_iter = iter
        if not math.isfinite(value):
            logger.warning("%s is %s in iteration %d, which cannot be the best", self.metric, value, iter)
            return False
        if self.best is not None and self._sign * (value - self.best) <= self._min_delta:
            return False
        self.best, self.best_iter = value, iter
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_iter": self.best_iter, "seen_iter": self._seen_iter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_iter, self._seen_iter = state["best"], state["best_iter"], state["seen_iter"]
