"""Is the newest value of a metric the best one so far?"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias

from trainkit.config import ConfigError
from trainkit.evaluation.testing import flatten_results_dict
from trainkit.utils import comm
from trainkit.utils.events import EventStorage
from trainkit.utils.logger import logging_from
from trainkit.utils.numbers import is_number

logger = logging.getLogger(__name__)

Mode: TypeAlias = Literal["max", "min", "auto"]

# OpenMMLab's, in lower case
_MAX_KEYS = ("acc", "top", "ar@", "auc", "precision", "map", "mdice", "miou", "macc", "aacc")
_MIN_KEYS = ("loss",)


def infer_mode(metric: str) -> Literal["max", "min"]:
    """Whether "max" or "min" is better, by the name of a metric.

    Only the part behind its last ``/`` counts, because what stands before it names data. It is "max" if that part
    contains one of OpenMMLab's ``greater_keys``, else "min" if it contains one of the ``less_keys``. (An exact match
    comes first there, which with these keys makes no difference.)

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


class MetricMonitor:
    """The best value of one metric, of which a hook asks after each evaluation.

    Args:
        metric: its name in the storage, such as ``classification/top1``.
        mode: whether "max" or "min" is better; "auto": see `infer_mode`.
        min_delta: by how much a value must be better than the best to count.

    Attributes:
        mode: "max" or "min".
        value: the newest value; ``best`` and ``best_iter``: the best one and its iteration.
        not_better: how many values in a row were not better than the best.

    Raises:
        ValueError: another mode, one that cannot be inferred, or a negative ``min_delta``.
    """

    def __init__(self, metric: str, mode: Mode = "max", min_delta: float = 0.0) -> None:
        if not isinstance(metric, str) or not metric:
            raise ValueError(f"a metric is the name of an evaluation result, such as 'task/top1'; got {metric!r}")
        if mode not in ("max", "min", "auto"):
            raise ValueError(f'mode must be "max", "min" or "auto", got {mode!r}')
        if not is_number(min_delta) or not min_delta >= 0:
            raise ValueError(f"min_delta must be >= 0, got {min_delta!r}")
        self.metric = metric
        self.mode = infer_mode(metric) if mode == "auto" else mode
        self._sign = 1 if self.mode == "max" else -1
        self._min_delta = min_delta
        self.forget()

    def forget(self) -> None:
        """Start anew."""
        self.value = math.nan
        self.best: float | None = None
        self.best_iter: int | None = None
        self.not_better = 0
        self._seen_iter: int | None = None

    def begin(self, start_iter: int) -> None:
        """Call it before training: a run from iteration 0 starts anew, another one goes on."""
        if start_iter == 0:
            self.forget()
        elif self._seen_iter is not None and self._seen_iter >= start_iter:
            self._seen_iter = None  # after training, values are stored at the iteration that comes next now

    def update(self, storage: EventStorage) -> bool | None:
        """True if there is a new best value, False if a new value is not better, None if there is no new value.

        A value that is not finite is never better.

        Raises:
            ValueError: the storage has no such metric.
        """
        latest = storage.latest()
        if self.metric not in latest:
            near = get_close_matches(self.metric, latest, n=1)
            raise ValueError(
                f"no evaluation has given the metric {self.metric!r}"
                + (f" (did you mean {near[0]!r}?)" if near else "")
                + f"; known are: {', '.join(sorted(latest)) or 'none'}"
            )
        value, iter = latest[self.metric]
        if iter == self._seen_iter:
            return None
        self._seen_iter, self.value = iter, value
        if not math.isfinite(value):
            logger.warning("%s is %s in iteration %d, which cannot be the best", self.metric, value, iter)
        elif self.best is None or self._sign * (value - self.best) > self._min_delta:
            self.best, self.best_iter, self.not_better = value, iter, 0
            return True
        self.not_better += 1
        return False

    def has_passed(self, threshold: float) -> bool:
        """Whether the newest value is finite and better than ``threshold``."""
        return math.isfinite(self.value) and self._sign * (self.value - threshold) > 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "mode": self.mode,
            "value": self.value,
            "best": self.best,
            "best_iter": self.best_iter,
            "not_better": self.not_better,
            "seen_iter": self._seen_iter,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; one of another metric or mode is left, with a warning."""
        saved, own = (state["metric"], state["mode"]), (self.metric, self.mode)
        if saved != own:
            logger.warning(
                "The best value in the checkpoint is of %s (%s), not of %s (%s); the best is sought anew", *saved, *own
            )
            self.forget()
            return
        self.value = state.get("value", math.nan)  # not in checkpoints that were written before there was exact resume
        self.best, self.best_iter = state["best"], state["best_iter"]
        self.not_better, self._seen_iter = state["not_better"], state["seen_iter"]


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
    logger.info("Evaluating one batch, to see whether the evaluation gives %s", ", ".join(monitored))
    results, failed = None, False
    try:
        with logging_from(logging.WARNING):  # what one batch gives is of no interest
            results = evaluate()
    except Exception:  # an evaluator may need the whole dataset
        logger.warning(
            "One batch does not show whether the evaluation gives %s, so the first evaluation will:",
            ", ".join(monitored),
            exc_info=True,
        )
        failed = True
    if any(comm.all_gather(failed)):  # rank 0, which has the results, may have failed alone
        return
    known = comm.broadcast(["total_loss", *flatten_results_dict(results or {})])
    for metric, hook in monitored.items():
        if metric not in known:
            near = get_close_matches(metric, known, n=1)
            raise ConfigError(
                f"{type(hook).__name__} looks at the metric {metric!r}, which the evaluation does not give"
                + (f"; did you mean {near[0]!r}?" if near else ".")
                + f" It gives: {', '.join(known)}"
            )
