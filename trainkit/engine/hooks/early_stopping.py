"""Stop when a metric no longer improves."""

import math
from typing import Any

from trainkit.engine.hook_base import HOOK_REGISTRY, SAVE_POINT
from trainkit.engine.hooks.monitor import MetricHook, Mode
from trainkit.utils.periods import check_number, check_period


@HOOK_REGISTRY.register()
class EarlyStopping(MetricHook):
    """Finish the run after ``patience`` evaluations in a row without a new best value of ``val_metric``.

    The final evaluation runs and ``model_final`` is written. For other arguments see `MetricHook`.

    Args:
        threshold: also finish when a value is better than this threshold.
        check_finite: also finish when a value is not finite.
    """

    priority = SAVE_POINT + 3
    config_keys = (
        *MetricHook.config_keys,
        *(("val_metric", "EARLY_STOPPING.METRIC"), ("mode", "EARLY_STOPPING.MODE")),
        *(("patience", "EARLY_STOPPING.PATIENCE"), ("min_delta", "EARLY_STOPPING.MIN_DELTA")),
        ("threshold", "EARLY_STOPPING.THRESHOLD"),
    )

    def __init__(
        self,
        eval_period: int,
        val_metric: str,
        mode: Mode = "auto",
        patience: int = 3,
        min_delta: float = 0.0,
        *,
        threshold: float | None = None,
        check_finite: bool = False,
    ) -> None:
        check_period("eval_period", eval_period, minimum=1)
        check_period("patience", patience, minimum=1)
        if threshold is not None:
            check_number("threshold", threshold, "(-inf, inf)")
        super().__init__(eval_period, val_metric, mode, min_delta)
        self._patience, self._threshold, self._check_finite = patience, threshold, check_finite

    def settings_of_early_end(self) -> dict[str, Any]:
        return {
            "metric": self.monitored_metric,
            "mode": self.mode,
            "patience": self._patience,
            "min_delta": self._min_delta,
            "threshold": self._threshold,
            "check_finite": self._check_finite,
        }

    def judge(self, value: float) -> str:
        """Why the run ends; "": it goes on."""
        metric = self.monitored_metric
        if self._check_finite and not math.isfinite(value):
            return f"{metric} is {value}"
        if (
            self._threshold is not None
            and math.isfinite(value)
            and self.is_better(value, self._threshold)
        ):
            return f"{metric} is {value}, which is better than the threshold {self._threshold}"
        if self.not_better < self._patience:
            return ""
        best = f"{self.best} (iteration {self.best_iter})"
        return f"{metric} has not been better than {best} in {self.not_better} evaluations"

    def act(self, decision: str) -> None:
        self.trainer.request_stop(decision, finished=True)
