"""Stop when a metric no longer gets better."""

import math
from typing import Any

from trainkit.engine.hook_base import SAVE_POINT, HookBase
from trainkit.engine.hooks.monitor import MetricMonitor, Mode
from trainkit.engine.hooks.registry import HOOK_REGISTRY
from trainkit.engine.periods import check_period, is_due, is_last
from trainkit.utils import comm
from trainkit.utils.numbers import is_number, is_whole


@HOOK_REGISTRY.register()
class EarlyStopping(HookBase):
    """Finish the run after ``patience`` evaluations in a row without a new best value of ``val_metric``.

    It stands behind the `EvalHook` and has its ``eval_period`` and ``offset``. A run that is stopped so counts as
    finished: it is evaluated and ``model_final`` is written. All ranks follow rank 0, which has the metrics.

    Args:
        mode: whether "max" or "min" is better; "auto": see `trainkit.engine.hooks.monitor.infer_mode`.
        min_delta: by how much a value must be better than the best to count.
        threshold: finish also when a value is better than this one.
        check_finite: finish also when a value is not finite; otherwise it counts as one that is not better.
    """

    priority = SAVE_POINT + 1

    def __init__(
        self,
        eval_period: int,
        val_metric: str,
        mode: Mode = "max",
        patience: int = 3,
        min_delta: float = 0.0,
        *,
        threshold: float | None = None,
        check_finite: bool = False,
        offset: int = 0,
    ) -> None:
        self._period = check_period("eval_period", eval_period, minimum=1)
        self._offset = check_period("offset", offset)
        if not is_whole(patience, 1):
            raise ValueError(f"patience must be >= 1 evaluation, got {patience!r}")
        if threshold is not None and not (is_number(threshold) and math.isfinite(threshold)):
            raise ValueError(f"threshold must be a finite number or None, got {threshold!r}")
        self._monitor = MetricMonitor(val_metric, mode, min_delta)
        self._patience = patience
        self._threshold = threshold
        self._check_finite = check_finite

    @property
    def monitored_metric(self) -> str:
        """The evaluation result that it needs."""
        return self._monitor.metric

    def before_train(self) -> None:
        self._monitor.begin(self.trainer.start_iter)

    def after_step(self) -> None:
        if not is_due(self.trainer, self._period, offset=self._offset) or is_last(self.trainer):
            return
        reason = comm.broadcast(self._reason_to_stop() if comm.is_main_process() else None)
        if reason is not None:
            self.trainer.request_stop(reason, finished=True)

    def _reason_to_stop(self) -> str | None:
        monitor = self._monitor
        if monitor.update(self.trainer.storage) is None:
            return None
        if self._check_finite and not math.isfinite(monitor.value):
            return f"{monitor.metric} is {monitor.value}"
        if self._threshold is not None and monitor.has_passed(self._threshold):
            return f"{monitor.metric} is {monitor.value}, which is better than the threshold {self._threshold}"
        if monitor.not_better >= self._patience:
            return (
                f"{monitor.metric} has not been better than {monitor.best} (iteration {monitor.best_iter}) "
                f"in {monitor.not_better} evaluations"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        return self._monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._monitor.load_state_dict(state_dict)
