"""Timing of iterations."""

import datetime
import logging
import time

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase, Priority
from trainkit.utils.periods import check_period, is_due, is_nth

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class IterationTimer(HookBase):
    """Store ``time``, the seconds of each step without hooks, and log the mean at the end.

    It runs before every other hook. Steps before the ``warmup_iter``-th of a run (allocations, autotuning) are not
    timed. If the trainer has epochs, ``epoch_time`` is stored for each epoch that was completed in this run: the
    seconds from the start of its first step to the end of its last step, with hooks.
    """

    priority = Priority.HIGHEST - 1

    def __init__(self, warmup_iter: int = 3) -> None:
        self._warmup_iter = check_period("warmup_iter", warmup_iter)
        self._timed_iters = 0

    def before_train(self) -> None:
        self._begin = self._step_begin = time.perf_counter()
        self._steps_sec = self._total_sec = 0.0
        self._timed_iters = self._started_iters = 0
        self._epoch_begin: float | None = None
        self._iters_per_epoch = self.trainer.iters_per_epoch if self.trainer.has_epochs else 0

    def before_step(self) -> None:
        self._step_begin = time.perf_counter()
        if self.trainer.iter == 0 or is_nth(self.trainer.iter, self._iters_per_epoch):
            self._epoch_begin = self._step_begin
        self._started_iters += 1
        if self._started_iters == self._warmup_iter:
            self._begin = self._step_begin

    def after_step(self) -> None:
        now = time.perf_counter()
        if self._epoch_begin is not None and is_due(self.trainer, self._iters_per_epoch):
            self.trainer.storage.put_scalar("epoch_time", now - self._epoch_begin, smoothing_hint=False)
        if self._started_iters >= self._warmup_iter:
            step_sec = now - self._step_begin
            self._steps_sec += step_sec
            self._timed_iters += 1
            self.trainer.storage.put_scalar("time", step_sec)

    def after_train(self) -> None:
        self._total_sec = time.perf_counter() - self._begin
        if self._timed_iters:
            steps, total = (datetime.timedelta(seconds=round(sec)) for sec in (self._steps_sec, self._total_sec))
            per_step = self._steps_sec / self._timed_iters
            logger.info("%d iterations in %s (%.4f s each); with hooks %s", self._timed_iters, steps, per_step, total)

    def summary(self) -> str:
        """Time per step, how much of it was waiting for data (as far as the storage knows), and how much hooks took."""
        if not self._timed_iters:
            return ""
        histories = self.trainer.storage.histories()
        step_secs = {iter: sec for sec, iter in histories["time"].values()}
        waits = histories["data_time"].values() if "data_time" in histories else []
        both = [(sec, step_secs[iter]) for sec, iter in waits if iter in step_secs]
        data = (
            f", {100 * sum(s for s, _ in both) / sum(s for _, s in both):.0f} % of it waiting for data" if both else ""
        )
        hooks_pct = 100 * (1 - self._steps_sec / self._total_sec)
        return f"{self._steps_sec / self._timed_iters:.4g} s per step{data}; {hooks_pct:.0f} % of the run in hooks"
