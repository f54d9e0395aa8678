"""Stop when a metric no longer improves."""

import math
from typing import Any, Literal

from trainkit.engine.hook_base import HOOK_REGISTRY, SAVE_POINT
from trainkit.engine.hooks.monitor import MetricHook, Mode
from trainkit.utils.periods import check_number, check_period, round_length, say_done


@HOOK_REGISTRY.register()
class EarlyStopping(MetricHook):
    """Finish the run after ``patience`` evaluations in a row without a new best value.

    The values are those of ``val_metric``. The final evaluation runs and ``model_final`` is
    written. For other arguments see `MetricHook`.

    Args:
        min_delta_mode: a value is better if it beats the best one by ``min_delta`` ("abs"), or by
            this fraction of the best one's absolute value ("rel").
        threshold: also finish when a value is better than this threshold.
        divergence: also finish when a value is worse than this number.
        start: values count after this many iterations; those before are as if they were not there.
        check_finite: also finish when a value is not finite.
    """

    priority = SAVE_POINT + 3
    config_keys = (
        *MetricHook.config_keys,
        ("val_metric", "EARLY_STOPPING.METRIC"),
        ("mode", "EARLY_STOPPING.MODE"),
        ("patience", "EARLY_STOPPING.PATIENCE"),
        ("min_delta", "EARLY_STOPPING.MIN_DELTA"),
        ("min_delta_mode", "EARLY_STOPPING.MIN_DELTA_MODE"),
        ("threshold", "EARLY_STOPPING.THRESHOLD"),
        ("divergence", "EARLY_STOPPING.DIVERGENCE"),
        ("start", "EARLY_STOPPING.START"),
    )

    def __init__(
        self,
        eval_period: int,
        val_metric: str,
        mode: Mode = "auto",
        patience: int = 3,
        min_delta: float = 0.0,
        *,
        min_delta_mode: Literal["abs", "rel"] = "abs",
        threshold: float | None = None,
        divergence: float | None = None,
        start: int = 0,
        check_finite: bool = False,
    ) -> None:
        check_period("eval_period (TEST.EVAL_PERIOD in a config)", eval_period, minimum=1)
        check_period("patience", patience, minimum=1)
        if threshold is not None:
            check_number("threshold", threshold, "(-inf, inf)")
        super().__init__(eval_period, val_metric, mode, min_delta)
        if min_delta_mode not in ("abs", "rel"):
            raise ValueError(f"min_delta_mode must be 'abs' or 'rel', got {min_delta_mode!r}")
        if divergence is not None:
            check_number("divergence", divergence, "(-inf, inf)")
        are_given = threshold is not None and divergence is not None
        if are_given and not self.is_better(threshold, divergence):  # type: ignore[arg-type]
            raise ValueError(
                f"the divergence {divergence!r} is not worse than the threshold {threshold!r}"
            )
        self._patience = patience
        self._is_relative = min_delta_mode == "rel"
        self._threshold = threshold
        self._divergence = divergence
        self._start = round_length(check_period("start", start))
        self._check_finite = check_finite

    def counts(self, iter: int) -> bool:
        return iter + 1 >= self._start

    def bound(self, best: float) -> float:
        if self._is_relative:
            return best + self._sign * self._min_delta * abs(best)
        return super().bound(best)

    def settings_of_early_end(self) -> dict[str, Any]:
        return {
            "metric": self.monitored_metric,
            "mode": self.mode,
            "patience": self._patience,
            "min_delta": self._min_delta,
            "is_relative": self._is_relative,
            "threshold": self._threshold,
            "divergence": self._divergence,
            "start": self._start,
            "check_finite": self._check_finite,
        }

    def judge(self, value: float) -> str:
        """Why the run ends; "": it goes on."""
        metric = self.monitored_metric
        if not math.isfinite(value):
            if self._check_finite:
                return f"{metric} is {value}"
        elif self._threshold is not None and self.is_better(value, self._threshold):
            return f"{metric} is {value}, which is better than the threshold {self._threshold}"
        elif self._divergence is not None and self.is_better(self._divergence, value):
            return f"{metric} is {value}, which is worse than {self._divergence}"
        if self.not_better < self._patience:
            return ""
        best = f"{self.best}"
        if self.best_iter is not None:
            best += f", {say_done(self.best_iter + 1)},"
        by = f" by more than {self._min_delta}" if self._min_delta else ""
        return f"{metric} has not been better than {best}{by} in {self.not_better} evaluations"

    def act(self, decision: str) -> None:
        self.trainer.request_stop(decision, finished=True)
