"""How long an iteration takes."""

import datetime
import logging
import time

from trainkit.engine.train_loop import HookBase, Priority

logger = logging.getLogger(__name__)


class IterationTimer(HookBase):
    """Store ``time``, the seconds of each step without the hooks behind it; say at the end how fast it was.

    It runs before every other hook, so that the time of a step ends before theirs begins. The first
    ``warmup_iter`` iterations of a run (allocations, autotuning) are left out of both.
    """

    priority = Priority.HIGHEST - 1

    def __init__(self, warmup_iter: int = 3) -> None:
        self._warmup_iter = warmup_iter
        self._forget()

    def _forget(self) -> None:
        self._begin = self._step_begin = time.perf_counter()
        self._steps_sec = 0.0
        self._timed_iters = 0
        self._started_iters = 0

    def before_train(self) -> None:
        self._forget()

    def before_step(self) -> None:
        self._step_begin = time.perf_counter()
        if self._started_iters == self._warmup_iter:
            self._begin = self._step_begin
        self._started_iters += 1

    def after_step(self) -> None:
        if self._started_iters <= self._warmup_iter:
            return
        step_sec = time.perf_counter() - self._step_begin
        self._steps_sec += step_sec
        self._timed_iters += 1
        self.trainer.storage.put_scalar("time", step_sec)

    def after_train(self) -> None:
        if self._timed_iters == 0:
            return
        total_sec = time.perf_counter() - self._begin
        logger.info(
            "%d iterations in %s (%.4f s each); with hooks %s (%s in hooks)",
            self._timed_iters,
            _hms(self._steps_sec),
            self._steps_sec / self._timed_iters,
            _hms(total_sec),
            _hms(total_sec - self._steps_sec),
        )


def _hms(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))
