"""Stop when a metric no longer gets better."""

from typing import Any, Literal

from trainkit.engine.hooks.monitor import MetricMonitor
from trainkit.engine.train_loop import HookBase, check_period, is_due
from trainkit.utils import comm


class EarlyStopping(HookBase):
    """Finish the run after ``patience`` evaluations in a row without a new best value of ``val_metric``.

    It stands behind the `EvalHook` and has its ``eval_period``. A run that is stopped so counts as finished: it
    is evaluated and ``model_final`` is written. All ranks follow rank 0, which has the metrics.

    Args:
        mode: whether "max" or "min" is better.
        min_delta: by how much a value must be better than the best to count.
    """

    def __init__(
        self,
        eval_period: int,
        val_metric: str,
        mode: Literal["max", "min"] = "max",
        patience: int = 3,
        min_delta: float = 0.0,
    ) -> None:
        self._period = check_period("eval_period", eval_period, minimum=1)
        if patience < 1:
            raise ValueError(f"patience must be >= 1 evaluation, got {patience}")
        self._monitor = MetricMonitor(val_metric, mode, min_delta)
        self._patience = patience
        self._not_better = 0

    def before_train(self) -> None:
        if self.trainer.start_iter == 0:
            self._monitor.forget()
            self._not_better = 0

    def after_step(self) -> None:
        if not is_due(self.trainer, self._period) or self.trainer.iter + 1 >= self.trainer.max_iter:
            return
        self.trainer.storage.flush()  # on every rank: what rank 0 reads may need the metrics of the others
        if comm.is_main_process():
            better = self._monitor.update(self.trainer.storage)
            if better is not None:
                self._not_better = 0 if better else self._not_better + 1
        self._not_better = comm.broadcast(self._not_better)
        if self._not_better >= self._patience:
            best, iter = comm.broadcast((self._monitor.best, self._monitor.best_iter))
            self.trainer.request_stop(
                f"{self._monitor.metric} has not been better than {best} (iteration {iter}) "
                f"in {self._not_better} evaluations",
                finished=True,
            )

    def state_dict(self) -> dict[str, Any]:
        return {**self._monitor.state_dict(), "not_better": self._not_better}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._monitor.load_state_dict(state_dict)
        self._not_better = state_dict["not_better"]
