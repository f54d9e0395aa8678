"""Hooks that look at a metric after each evaluation."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from trainkit.config import ConfigError
from trainkit.engine.hook_base import SAVE_POINT, HookBase
from trainkit.engine.periods import check_period, is_due, is_last
from trainkit.evaluation.testing import flatten_results_dict
from trainkit.utils import comm
from trainkit.utils.logger import logging_from
from trainkit.utils.numbers import is_number
from trainkit.utils.registry import did_you_mean

logger = logging.getLogger(__name__)

Mode: TypeAlias = Literal["max", "min", "auto"]

# OpenMMLab's, in lower case
_MAX_KEYS = ("acc", "top", "ar@", "auc", "precision", "map", "mdice", "miou", "macc", "aacc")
_MIN_KEYS = ("loss",)


def infer_mode(metric: str) -> Literal["max", "min"]:
    """Whether "max" or "min" is better, by the name of a metric.

    Only the part after its last ``/`` counts, since what stands before it names data. It is "max" if that part
    contains one of OpenMMLab's ``greater_keys``, else "min" if it contains one of the ``less_keys``.

    Raises:
        ValueError: the name tells neither.
    """
    name = metric.rpartition("/")[2].lower()
    if any(key in name for key in _MAX_KEYS):
        return "max"
    if any(key in name for key in _MIN_KEYS):
        return "min"
    raise ValueError(
        f"the name of the metric {metric!r} does not tell whether more or less is better; set its mode to "
        '"max" or "min" (in the config: CHECKPOINT.BEST_MODE, EARLY_STOPPING.MODE)'
    )


class MetricHook(HookBase):
    """Base of the hooks that act on the newest value of a metric. Rank 0, which has the metrics, decides for all.

    A subclass defines ``judge`` and ``act``.

    Args:
        eval_period, offset: those of the `EvalHook`, after which it stands.
        val_metric: its name in the storage, such as ``classification/top1``.
        mode: whether "max" or "min" is better; "auto": see `infer_mode`.
        min_delta: by how much a value must be better than the best to count; a share of the best if ``is_relative``.

    Attributes:
        best, best_iter: the best value and its iteration; a value that is not finite is never better.
        not_better: how many values in a row were not better than the best.
    """

    priority = SAVE_POINT + 1
    ends = True
    min_period: ClassVar[int] = 1  # 0: an ``eval_period`` of 0 makes sense

    def __init__(
        self,
        eval_period: int,
        val_metric: str,
        mode: Mode,
        min_delta: float = 0.0,
        *,
        offset: int = 0,
        is_relative: bool = False,
    ) -> None:
        self._period = check_period("eval_period", eval_period, minimum=self.min_period)
        self._offset = check_period("offset", offset)
        if not isinstance(val_metric, str) or not val_metric:
            raise ValueError(f"a metric is the name of an evaluation result, such as 'task/top1'; got {val_metric!r}")
        if mode not in ("max", "min", "auto"):
            raise ValueError(f'mode must be "max", "min" or "auto", got {mode!r}')
        if not is_number(min_delta) or not min_delta >= 0:
            raise ValueError(f"min_delta must be >= 0, got {min_delta!r}")
        self.monitored_metric = val_metric
        self.mode = infer_mode(val_metric) if mode == "auto" else mode
        self._sign = 1 if self.mode == "max" else -1
        self._min_delta, self._is_relative = min_delta, is_relative
        self._forget()

    def _forget(self) -> None:
        self.best: float | None = None
        self.best_iter: int | None = None
        self.not_better = 0
        self._seen_iter: int | None = None

    def judge(self, value: float) -> Any:
        """On rank 0, after each new value: what ``act`` gets on every rank; something false: nothing is to do."""
        raise NotImplementedError

    def act(self, decision: Any) -> None:
        raise NotImplementedError

    def before_train(self) -> None:
        if self.trainer.start_iter == 0:
            self._forget()
        elif self._seen_iter is not None and self._seen_iter >= self.trainer.start_iter:
            self._seen_iter = None  # the evaluation after training was stored at the iteration that comes next now

    def after_step(self) -> None:
        if is_due(self.trainer, self._period, offset=self._offset) and not is_last(self.trainer):
            self.look()

    def look(self) -> None:
        """Judge the newest value if it is new; every rank calls it.

        Raises:
            ValueError: the storage has no such metric.
        """
        decision = None
        if comm.is_main_process() and (value := self._take()) is not None:
            decision = self.judge(value)
        if decision := comm.broadcast(decision):
            self.act(decision)

    def _take(self) -> float | None:
        """The newest value, counted; None if it was counted before."""
        latest = self.trainer.storage.latest()
        if self.monitored_metric not in latest:
            raise ValueError(
                f"no evaluation has given the metric {self.monitored_metric!r}; "
                f"{did_you_mean(self.monitored_metric, latest)}known are: {', '.join(sorted(latest)) or 'none'}"
            )
        value, iter = latest[self.monitored_metric]
        if iter == self._seen_iter:
            return None
        self._seen_iter = iter
        if not math.isfinite(value):
            logger.warning("%s is %s in iteration %d, which cannot be the best", self.monitored_metric, value, iter)
        if self._is_best(value):
            self.best, self.best_iter, self.not_better = value, iter, 0
        else:
            self.not_better += 1
        return float(value)

    def _is_best(self, value: float) -> bool:
        if self.best is None or not math.isfinite(value):
            return math.isfinite(value)
        if self._is_relative:
            bound = self.best * (1.0 + self._sign * self._min_delta)
        else:
            bound = self.best + self._sign * self._min_delta
        return self.is_better(value, bound)

    def is_better(self, value: float, than: float) -> bool:
        return self._sign * value > self._sign * than

    def state_dict(self) -> dict[str, Any]:
        return {
            "metric": self.monitored_metric,
            "mode": self.mode,
            "best": self.best,
            "best_iter": self.best_iter,
            "not_better": self.not_better,
            "seen_iter": self._seen_iter,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state; one of another metric or mode is left, with a warning."""
        saved, own = (state_dict["metric"], state_dict["mode"]), (self.monitored_metric, self.mode)
        if saved != own:
            logger.warning(
                "The best value in the checkpoint is of %s (%s), not of %s (%s); the best is sought anew", *saved, *own
            )
            self._forget()
            return
        self.best, self.best_iter = state_dict["best"], state_dict["best_iter"]
        self.not_better, self._seen_iter = state_dict["not_better"], state_dict["seen_iter"]


def check_monitored_metrics(hooks: Iterable[Any], evaluate: Callable[[], Mapping[str, Any]]) -> None:
    """Find metrics that a hook looks at (``monitored_metric``) and no evaluation gives, before training.

    Args:
        evaluate: gives results with the names of those to come, on rank 0; called on every rank if a hook needs it. If
            it fails, a warning is logged, and it is left to the first evaluation.

    Raises:
        ConfigError: there is such a metric.
    """
    monitored = {hook.monitored_metric: hook for hook in hooks if getattr(hook, "monitored_metric", None)}
    if not monitored:
        return
    names = ", ".join(monitored)
    logger.info("Evaluating one batch, to see whether the evaluation gives %s", names)
    results, failed = None, False
    try:
        with logging_from(logging.WARNING):  # what one batch gives is of no interest
            results = evaluate()
    except Exception:  # an evaluator may need the whole dataset
        text = "One batch does not show whether the evaluation gives %s, so the first evaluation will:"
        logger.warning(text, names, exc_info=True)
        failed = True
    if any(comm.all_gather(failed)):  # rank 0, which has the results, may have failed alone
        return
    known = comm.broadcast(["total_loss", *flatten_results_dict(results or {})])
    for metric, hook in monitored.items():
        if metric not in known:
            raise ConfigError(
                f"{type(hook).__name__} looks at the metric {metric!r}, which the evaluation does not give; "
                f"{did_you_mean(metric, known)}it gives: {', '.join(known)}"
            )
