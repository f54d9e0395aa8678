"""Timing of iterations."""

import datetime
import logging
import time

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase, Priority
from trainkit.utils.periods import check_period

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class IterationTimer(HookBase):
    """Store ``time``, the seconds of each step, and log the mean at the end.

    A step is timed from its ``before_step`` to its ``after_step``. This hook runs before every
    other one, so the time holds their ``before_step`` and ``after_backward``. Steps before the
    ``warmup_iter``-th of a new run (allocations, autotuning) are not timed.
    """

    priority = Priority.HIGHEST - 1

    def __init__(self, warmup_iter: int = 3) -> None:
        self._warmup_iter = check_period("warmup_iter", warmup_iter)
        self._timed_iters = 0

    def before_train(self) -> None:
        self._start_sec = time.perf_counter()
        self._step_start_sec = self._start_sec
        self._steps_sec = 0.0
        self._hooks_sec = 0.0
        self._num_pauses = 0  # between two steps
        self._step_end_sec: float | None = None
        self._total_sec = 0.0
        self._timed_iters = 0
        # a resumed run writes the same lines
        self._started_iters = min(self.trainer.start_iter, self._warmup_iter)

    def before_step(self) -> None:
        self._step_start_sec = time.perf_counter()
        if self._step_end_sec is not None:
            self._hooks_sec += self._step_start_sec - self._step_end_sec
            self._num_pauses += 1
        self._started_iters += 1
        if self._started_iters == self._warmup_iter:
            self._start_sec = self._step_start_sec

    def after_step(self) -> None:
        self._step_end_sec = time.perf_counter()
        if self._started_iters >= self._warmup_iter:
            step_sec = self._step_end_sec - self._step_start_sec
            self._steps_sec += step_sec
            self._timed_iters += 1
            self.trainer.storage.put_scalar("time", step_sec)

    @property
    def hooks_sec_per_iter(self) -> float:
        """The mean time from the end of a step to the start of the next one in this run."""
        return self._hooks_sec / self._num_pauses if self._num_pauses > 0 else 0.0

    def after_train(self) -> None:
        self._total_sec = time.perf_counter() - self._start_sec
        if self._timed_iters > 0:
            num_skipped = self.trainer.done - self.trainer.start_iter - self._timed_iters
            skipped = f" (without the first {num_skipped})" if num_skipped > 0 else ""
            logger.info(
                "%d iterations%s in %s (%.4f s each); with hooks %s",
                self._timed_iters,
                skipped,
                datetime.timedelta(seconds=round(self._steps_sec)),
                self._steps_sec / self._timed_iters,
                datetime.timedelta(seconds=round(self._total_sec)),
            )

    def summary(self) -> str:
        """The time of a step, its part of waiting for data, and the part of the run in hooks."""
        if self._timed_iters == 0:
            return ""
        step_sec = self._steps_sec / self._timed_iters
        data_time = self.trainer.storage.histories().get("data_time")
        waiting = ""
        if data_time is not None:
            waiting_pct = 100 * data_time.avg(self._timed_iters) / step_sec
            waiting = f", {waiting_pct:.0f} % of it waiting for data"
        hooks_pct = 100 * (1 - self._steps_sec / self._total_sec)
        return f"{step_sec:.4g} s per step{waiting}; {hooks_pct:.0f} % of the run in hooks"
