"""How much device memory training takes."""

import logging

import torch

from trainkit.engine.hook_base import HookBase
from trainkit.engine.hooks.registry import HOOK_REGISTRY
from trainkit.engine.periods import check_period, is_due
from trainkit.utils.numbers import is_whole

logger = logging.getLogger(__name__)

_MIB = 2**20


@HOOK_REGISTRY.register()
class TorchMemoryStats(HookBase):
    """Log the CUDA memory of every ``period`` iterations, ``max_runs`` times, the last time with torch's own summary.

    Nothing is reset: other readers of the peak, such as the console writer, see the same numbers. Silent without CUDA.
    """

    def __init__(self, period: int = 20, max_runs: int = 10) -> None:
        self._period = check_period("period", period, minimum=1)
        if not is_whole(max_runs, 0):
            raise ValueError(f"max_runs must be a whole number >= 0, got {max_runs!r}")
        self._max_runs = max_runs

    def before_train(self) -> None:
        self._runs = 0

    def after_step(self) -> None:
        wants = self._runs < self._max_runs and is_due(self.trainer, self._period, or_last=True)
        if not wants or not torch.cuda.is_available():
            return
        self._runs += 1
        logger.info(
            "CUDA memory after iteration %d: %.0f MiB allocated, peak %.0f; %.0f MiB reserved, peak %.0f",
            self.trainer.iter,
            torch.cuda.memory_allocated() / _MIB,
            torch.cuda.max_memory_allocated() / _MIB,
            torch.cuda.memory_reserved() / _MIB,
            torch.cuda.max_memory_reserved() / _MIB,
        )
        if self._runs == self._max_runs:
            logger.info("\n%s", torch.cuda.memory_summary())
