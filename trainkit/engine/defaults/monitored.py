"""Find hooks that follow a metric which no evaluation of a job can give, before the job trains."""

from typing import Any

from trainkit.config import ConfigError
from trainkit.engine.hook_list import overrides
from trainkit.engine.hooks.callback import CallbackHook
from trainkit.engine.hooks.evaluation import EvalHook, FinalEvalHook
from trainkit.engine.hooks.monitor import MetricHook
from trainkit.evaluation.evaluator import known_results_of
from trainkit.utils.registry import did_you_mean

_OWN = ("trainkit.", "projects.")


def check_monitored_metrics(trainer: Any) -> None:
    """Raises ConfigError if a hook of a `DefaultTrainer` follows a metric that cannot come.

    What can store a metric of any name is not judged: a hook or an evaluation of the user's own.
    Nor is a name without ``/``, which may be a loss of the training. If only an evaluation can
    tell, `MetricHook` finds it there.
    """
    if _has_other_sources(trainer):
        return
    for hook in trainer.hooks:
        if isinstance(hook, MetricHook) and "/" in hook.monitored_metric:
            reason = _why_never(trainer, hook.monitored_metric)
            if reason:
                raise ConfigError(
                    f"{reason}; {type(hook).__name__} follows the metric "
                    f"{hook.monitored_metric!r}, by CHECKPOINT.BEST_METRIC, EARLY_STOPPING.METRIC, "
                    "or VAL_METRIC in HOOKS"
                )


def _has_other_sources(trainer: Any) -> bool:
    for method in ("test", "test_with_hooks"):
        if not trainer.is_default(method):
            return True
    evaluations = 0
    for hook in trainer.hooks:
        if isinstance(hook, CallbackHook) or not type(hook).__module__.startswith(_OWN):
            return True
        if isinstance(hook, EvalHook) and not isinstance(hook, FinalEvalHook):
            evaluations += 1
    return evaluations != 1


def _why_never(trainer: Any, metric: str) -> str:
    """Why the metric cannot come; "": it may."""
    cfg = trainer.cfg
    datasets = cfg.DATASETS.VAL or cfg.DATASETS.TEST
    if not datasets:
        return "DATASETS.VAL and DATASETS.TEST are empty; name a dataset to evaluate"
    if not trainer.is_default("build_evaluator"):
        return ""
    if not cfg.TEST.EVALUATORS:
        return "TEST.EVALUATORS is empty; name an evaluator that gives it"
    known: list[str] = []
    for dataset in datasets:
        prefix = f"{dataset}/" if len(datasets) > 1 else ""
        results = known_results_of(trainer.build_evaluator(cfg, dataset))
        if results is None:
            return ""
        for task, names in results.items():
            if names is None:
                known.append(f"{prefix}{task}/...")
            else:
                known += [f"{prefix}{task}/{name}" for name in names]
    # a hook that evaluates other weights puts a name before those of further ones
    offers = any(overrides(hook, "evaluated_models") for hook in trainer.hooks)
    if any(_fits(metric, name, offers) for name in known):
        return ""
    return (
        f"the evaluations give {', '.join(known)}; {did_you_mean(metric, known)}write one of these"
    )


def _fits(metric: str, known: str, offers: bool) -> bool:
    if offers:
        _, _, rest = metric.partition("/")
        if _fits(rest, known, False):
            return True
    if known.endswith("/..."):
        return metric.startswith(known.removesuffix("..."))
    return metric == known
