"""The base classes of hooks that evaluate, and of hooks that act on a metric."""

import logging
import math
from typing import Any, Literal, NoReturn, TypeAlias

from trainkit.engine.hook_base import SAVE_POINT, HookBase
from trainkit.utils import comm
from trainkit.utils.direction import infer_mode
from trainkit.utils.errors import ConfigError
from trainkit.utils.periods import check_number, check_period, is_due, is_last
from trainkit.utils.registry import did_you_mean

logger = logging.getLogger(__name__)

Mode: TypeAlias = Literal["max", "min", "auto"]

_BETTER = {"max": "larger", "min": "smaller"}


class PeriodicHook(HookBase):
    """Call ``act_now`` every ``eval_period`` iterations, below the save point.

    0: only after training.

    In a `DefaultTrainer` the first call comes after TEST.EVAL_START iterations, if this is not 0.
    """

    priority = SAVE_POINT + 1
    ends = True
    config_keys: tuple[tuple[str, str], ...] = (("eval_period", "TEST.EVAL_PERIOD"),)
    acts_in_last = False  # False: the last iteration is left to ``after_train``

    def __init__(self, eval_period: int) -> None:
        self._period = check_period("eval_period", eval_period)

    @property
    def _offset(self) -> int:
        """TEST.EVAL_START; 0 for a trainer without a config."""
        cfg: Any = getattr(self.trainer, "cfg", None)
        test: Any = getattr(cfg, "TEST", None)
        return getattr(test, "EVAL_START", 0)

    def act_now(self) -> None:
        raise NotImplementedError

    def after_step(self) -> None:
        if not is_due(self.trainer, self._period, offset=self._offset):
            return
        if self.acts_in_last or not is_last(self.trainer):
            self.act_now()


class MetricHook(PeriodicHook):
    """Base class of hooks that act on the newest value of a metric.

    Rank 0, which has the metrics, decides for all.

    Args:
        eval_period: as given to the `EvalHook`, which must run before this hook.
        val_metric: its name in the storage, such as ``classification/top1``.
        mode: whether "max" or "min" is better; "auto": by the name, see `infer_mode`. A name that
            does not say it has "max" with a warning, as in detectron2.
        min_delta: a value is better only if it beats the best one by this much. One that is not
            finite never is.
    """

    _state_names: tuple[str, ...] = ("best", "best_iter", "not_better", "_seen_iter")

    def __init__(
        self, eval_period: int, val_metric: str, mode: Mode, min_delta: float = 0.0
    ) -> None:
        super().__init__(eval_period)
        self.monitored_metric = val_metric
        self._min_delta = check_number("min_delta", min_delta, "[0, inf)")
        self.mode = self._choose_mode(mode)
        self._sign = 1 if self.mode == "max" else -1
        # the metrics that there were when the monitored one was missing; None: it was not missing
        self._known_metrics: list[str] | None = None
        self._forget()

    def _choose_mode(self, mode: Mode) -> Literal["max", "min"]:
        if mode not in ("max", "min", "auto"):
            raise ValueError(f'mode must be "max", "min" or "auto", got {mode!r}')
        hook = type(self).__name__
        metric = self.monitored_metric
        by_name = infer_mode(metric)
        if mode != "auto":
            if by_name not in (mode, None):
                text = "%s: mode is %r, but by the name %r %s values are better"
                logger.warning(text, hook, mode, metric, _BETTER[by_name])
            return mode
        if by_name is None:
            text = (
                '%s: the name %r does not say whether more is better; mode is "max", as in '
                "detectron2. Set mode (in a config CHECKPOINT.BEST_MODE, EARLY_STOPPING.MODE)"
            )
            logger.warning(text, hook, metric)
            return "max"
        text = "%s: %s %s is better, by its name; set mode to change this"
        logger.info(text, hook, _BETTER[by_name], metric)
        return by_name

    def _forget(self) -> None:
        self.best: float | None = None
        self.best_iter: int | None = None
        self.not_better = 0  # number of values in a row that were not better than the best
        self._seen_iter: int | None = None

    def judge(self, value: float) -> Any:
        """Called on rank 0 with each new value.

        Returns the argument of ``act``, which is called on every rank; if it is false, ``act`` is
        not called.
        """
        raise NotImplementedError

    def act(self, decision: Any) -> None:
        raise NotImplementedError

    def before_train(self) -> None:
        self._known_metrics = None
        if self.trainer.start_iter == 0:
            self._forget()
        elif self._seen_iter is not None and self._seen_iter >= self.trainer.start_iter:
            # the evaluation after training has stored its results under the next iteration
            self._seen_iter = None

    def after_train(self) -> None:
        """Raises ConfigError if an evaluation did not give the metric.

        By now the stopped run is saved.
        """
        if self._known_metrics is not None and self.trainer.status != "failed":
            self._raise_missing(self._known_metrics)

    def act_now(self) -> None:
        """Judge the newest value if it is new; every rank calls it.

        If the storage has none, the run is stopped and saved, and ends with a ConfigError that
        names known metrics.
        """
        decision: Any = None
        known: list[str] | None = None
        if comm.is_main_process():
            latest = self.trainer.storage.latest()
            if self.monitored_metric in latest:
                value, iter = latest[self.monitored_metric]
                if self._record_if_new(value, iter):
                    decision = self.judge(value)
            else:
                known = sorted(latest)
        decision, known = comm.broadcast((decision, known))
        if known is None:
            if decision:
                self.act(decision)
            return
        if self.trainer.status != "running":
            self._raise_missing(known)
        self._known_metrics = known
        self.trainer.request_stop(f"no evaluation has given the metric {self.monitored_metric!r}")

    def _raise_missing(self, known: list[str]) -> NoReturn:
        metric = self.monitored_metric
        raise ConfigError(
            f"{type(self).__name__}: no evaluation has given the metric {metric!r}; "
            f"{did_you_mean(metric, known)}known are: {', '.join(known) or 'none'}"
        )

    def _record_if_new(self, value: float, iter: int) -> bool:
        """Compare the newest value with the best one, and note the result.

        Returns False if it was seen before, or does not count.
        """
        if iter == self._seen_iter:
            return False
        self._seen_iter = iter
        if not self.counts(iter):
            return False
        if self._is_new_best(value):
            self.best = value
            # the evaluation at the end of a run is stored at the next iteration
            self.best_iter = min(iter, self.trainer.done - 1)
            self.not_better = 0
        else:
            self.not_better += 1
        return True

    def _is_new_best(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        return self.best is None or self.is_better(value, self.bound(self.best))

    def counts(self, iter: int) -> bool:
        """Whether a value of this iteration counts; else it is as if it were not there."""
        return True

    def bound(self, best: float) -> float:
        """A value is better than ``best`` if it is better than this."""
        return best + self._sign * self._min_delta

    def is_better(self, value: float, than: float) -> bool:
        return self._sign * value > self._sign * than

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.monitored_metric, "mode": self.mode, **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state.

        The state of another metric or mode is ignored with a warning.
        """
        if state_dict["metric"] == self.monitored_metric and state_dict["mode"] == self.mode:
            if state_dict["best"] is not None:
                check_number("best", state_dict["best"], "(-inf, inf)")
            for name in ("best_iter", "seen_iter"):
                if state_dict[name] is not None:
                    check_period(name, state_dict[name])
            check_period("not_better", state_dict["not_better"])
            super().load_state_dict(state_dict)
        else:
            logger.warning(
                "The best value of %s is ignored: it is of another metric or mode",
                type(self).__name__,
            )
            self._forget()
