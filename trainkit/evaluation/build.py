"""Build evaluators by name."""

from trainkit.config.config import CfgNode
from trainkit.config.errors import ConfigError, look_up
from trainkit.evaluation.classification import ClassificationEvaluator
from trainkit.evaluation.evaluator import DatasetEvaluator, DatasetEvaluators
from trainkit.evaluation.loss import LossEvaluator
from trainkit.utils.registry import Registry

EVALUATOR_REGISTRY = Registry("EVALUATOR")
"""Classes or functions that take ``(cfg, dataset_name)`` and return a ``DatasetEvaluator``."""

EVALUATOR_REGISTRY.register(ClassificationEvaluator)
EVALUATOR_REGISTRY.register(LossEvaluator)


def build_evaluator(cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
    """Build the evaluators of ``cfg.TEST.EVALUATORS``; several become one ``DatasetEvaluators``.

    Raises:
        ConfigError: ``cfg.TEST.EVALUATORS`` is empty, or nothing is registered under a name.
    """
    names = cfg.TEST.EVALUATORS
    if not names:
        registered = ", ".join(sorted(entry for entry, _ in EVALUATOR_REGISTRY))
        raise ConfigError(
            f"TEST.EVALUATORS is empty, so nothing evaluates {dataset_name!r}; name one or more of: {registered}"
        )
    entries = [look_up(EVALUATOR_REGISTRY, name, "TEST.EVALUATORS") for name in names]
    evaluators = [entry(cfg, dataset_name) for entry in entries]
    return evaluators[0] if len(evaluators) == 1 else DatasetEvaluators(evaluators)
