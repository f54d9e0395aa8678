"""Reduce the learning rate when a metric no longer gets better."""

import logging
import math
from typing import Any, Literal

from trainkit.config import ConfigError
from trainkit.engine.hook_base import SAVE_POINT, HookBase
from trainkit.engine.hooks.lr_scheduler import LRScheduler
from trainkit.engine.hooks.monitor import MetricMonitor, Mode
from trainkit.engine.hooks.registry import HOOK_REGISTRY
from trainkit.engine.periods import check_period, is_due, is_last
from trainkit.solver.lr_scheduler import ScheduledLR
from trainkit.utils import comm
from trainkit.utils.numbers import is_number, is_whole

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class ReduceOnPlateau(HookBase):
    """Multiply the learning rate by ``factor`` after more than ``patience`` evaluations without a better value.

    It stands behind the `EvalHook` and has its ``eval_period`` and ``offset``. When to reduce is decided as by torch's
    ``ReduceLROnPlateau``; the scheduler keeps the factor and sets the rate. All ranks follow rank 0, which has the
    metrics. A value that is not finite is never better.

    Args:
        mode: whether "max" or "min" is better; "auto": see `trainkit.engine.hooks.monitor.infer_mode`.
        threshold: by how much a value must be better than the best to count: a share of the best ("rel") or a
            difference ("abs").
        cooldown: so many evaluations after a reduction are not counted.
        min_factor: all reductions together do not go below it.

    Raises:
        ValueError: an argument is not accepted.
        ConfigError: when the training begins, if ``trainer.scheduler`` cannot be reduced, or no `LRScheduler`
            hook steps and saves it.
    """

    priority = SAVE_POINT + 1

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
        *,
        offset: int = 0,
    ) -> None:
        self._period = check_period("eval_period", eval_period, minimum=1)
        self._offset = check_period("offset", offset)
        self._monitor = MetricMonitor(val_metric, mode)
        if threshold_mode not in ("rel", "abs"):
            raise ValueError(f'threshold_mode must be "rel" or "abs", got {threshold_mode!r}')
        if not is_number(factor) or not 0 <= factor < 1:
            raise ValueError(f"factor must be between 0 and 1, 1 not included, got {factor!r}")
        if not is_number(min_factor) or not 0 <= min_factor <= 1:
            raise ValueError(f"min_factor must be between 0 and 1, got {min_factor!r}")
        if not is_number(threshold) or not threshold >= 0:
            raise ValueError(f"threshold must be >= 0, got {threshold!r}")
        for name, value in (("patience", patience), ("cooldown", cooldown)):
            if not is_whole(value, 0):
                raise ValueError(f"{name} must be a whole number of evaluations >= 0, got {value!r}")
        self._factor, self._min_factor = factor, min_factor
        self._patience, self._cooldown = patience, cooldown
        self._threshold, self._threshold_mode = threshold, threshold_mode
        self._forget()

    @property
    def monitored_metric(self) -> str:
        """The evaluation result that it needs."""
        return self._monitor.metric

    def _forget(self) -> None:
        self._monitor.forget()
        self._best: float | None = None  # the monitor's own has no threshold
        self._not_better = self._cooling = 0

    def before_train(self) -> None:
        scheduler = getattr(self.trainer, "scheduler", None)
        if not isinstance(scheduler, ScheduledLR):
            raise ConfigError(
                "ReduceOnPlateau needs trainer.scheduler to be a trainkit.solver.LRMultiplier or LRFunction, such as "
                f"build_lr_scheduler gives, got {scheduler!r}"
            )
        if not any(isinstance(hook, LRScheduler) for hook in self.trainer.hooks):
            raise ConfigError(
                "ReduceOnPlateau needs an LRScheduler hook, which steps and saves the scheduler; register one"
            )
        if self.trainer.start_iter == 0:
            self._forget()
            scheduler.set_factors([])
        self._monitor.begin(self.trainer.start_iter)

    def after_step(self) -> None:
        if not is_due(self.trainer, self._period, offset=self._offset) or is_last(self.trainer):
            return
        reduce = False
        if comm.is_main_process() and self._monitor.update(self.trainer.storage) is not None:
            reduce = self._count(self._monitor.value)
        if comm.broadcast(reduce):
            scheduler = self.trainer.scheduler
            scheduler.reduce(self._factor, self._min_factor)
            logger.info(
                "%s has not been better in %d evaluations; the learning rate is multiplied by %g from now on",
                self._monitor.metric,
                self._patience + 1,
                math.prod(scheduler.factors),
            )

    def _count(self, value: float) -> bool:
        """Take one more value; whether to reduce."""
        if self._is_better(value):
            self._best, self._not_better = value, 0
        else:
            self._not_better += 1
        if self._cooling > 0:
            self._cooling -= 1
            self._not_better = 0
        if self._not_better <= self._patience:
            return False
        self._cooling, self._not_better = self._cooldown, 0
        return True

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value) or self._best is None:
            return math.isfinite(value)
        sign = 1 if self._monitor.mode == "max" else -1
        if self._threshold_mode == "rel":
            bound = self._best * (1.0 + sign * self._threshold)
        else:
            bound = self._best + sign * self._threshold
        return sign * value > sign * bound

    def state_dict(self) -> dict[str, Any]:
        return {
            "monitor": self._monitor.state_dict(),
            "best": self._best,
            "not_better": self._not_better,
            "cooling": self._cooling,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved, monitor = state_dict["monitor"], self._monitor
        monitor.load_state_dict(saved)
        if (saved["metric"], saved["mode"]) == (monitor.metric, monitor.mode):  # otherwise the monitor has warned
            self._best, self._not_better = state_dict["best"], state_dict["not_better"]
            self._cooling = state_dict["cooling"]
