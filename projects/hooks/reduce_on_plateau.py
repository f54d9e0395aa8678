"""Reduce the learning rate when a metric no longer improves."""

import logging
import math
from typing import Any, Literal

from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, SAVE_POINT
from trainkit.engine.hooks.evaluation import EvalHook
from trainkit.engine.hooks.monitor import MetricHook, Mode
from trainkit.solver.lr_scheduler import ScheduledLR

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class ReduceOnPlateau(MetricHook):
    """Multiply the learning rate by ``factor`` after more than ``patience`` evaluations without a better value.

    It decides like torch's ``ReduceLROnPlateau``; the trainer's scheduler, which an `LRScheduler` hook steps, keeps the
    factor and sets the rate.

    Args:
        eval_period, val_metric, mode: see `trainkit.engine.hooks.monitor.MetricHook`.
        threshold: a value is better only if it beats the best one by this fraction of the best ("rel") or by this
            difference ("abs").
        cooldown: number of evaluations after a reduction that are not counted.
        min_factor: the product of all reductions stays at or above it.
    """

    priority = SAVE_POINT + 2  # after the evaluation, before the best checkpoint
    _state_names = (*MetricHook._state_names, "_cooling")

    def __init__(
        self,
        eval_period: int,
        val_metric: str,
        mode: Mode = "max",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: Literal["rel", "abs"] = "rel",
        cooldown: int = 0,
        min_factor: float = 0.0,
    ) -> None:
        super().__init__(eval_period, val_metric, mode, threshold)
        if threshold_mode not in ("rel", "abs") or not 0 <= factor < 1 or not 0 <= min_factor <= 1:
            accepted = 'threshold_mode must be "rel" or "abs", factor and min_factor from 0 to below 1'
            raise ValueError(f"{accepted}; got {threshold_mode!r}, {factor!r} and {min_factor!r}")
        self._factor, self._min_factor, self._is_relative = factor, min_factor, threshold_mode == "rel"
        self._patience, self._cooldown = patience, cooldown

    def _forget(self) -> None:
        super()._forget()
        self._cooling = 0

    def before_train(self) -> None:
        """Raises ConfigError if ``trainer.scheduler`` cannot be reduced, or no `EvalHook` has the same period."""
        super().before_train()
        scheduler = getattr(self.trainer, "scheduler", None)
        if not isinstance(scheduler, ScheduledLR):
            raise ConfigError(f"ReduceOnPlateau needs a trainer.scheduler of trainkit, got {scheduler!r}")
        evaluations = [hook._period for hook in self.trainer.hooks if type(hook) is EvalHook]
        if evaluations and self._period not in evaluations:
            raise ConfigError(f"ReduceOnPlateau has eval_period {self._period}, unlike every EvalHook; leave it out")
        if self.trainer.start_iter == 0:
            self._set_factors([])

    def bound(self, best: float) -> float:
        return best * (1.0 + self._sign * self._min_delta) if self._is_relative else super().bound(best)

    def judge(self, value: float) -> bool:
        if self._cooling > 0:
            self._cooling, self.not_better = self._cooling - 1, 0
        is_over = self.not_better > self._patience
        if is_over:
            self._cooling, self.not_better = self._cooldown, 0
        return is_over

    def act(self, decision: bool) -> None:
        factors = [*self.trainer.scheduler.factors, self._factor]
        self._set_factors(factors if math.prod(factors) > self._min_factor else [self._min_factor])

    def _set_factors(self, factors: list[float]) -> None:
        scheduler = self.trainer.scheduler
        if factors:
            text = "%s is no longer better; the learning rate is multiplied by %g from now on"
            logger.info(text, self.monitored_metric, math.prod(factors))
        scheduler.factors = factors
        scheduler.seek(scheduler.last_epoch)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict.get("monitor", {}), **state_dict})  # older files have a part "monitor"
