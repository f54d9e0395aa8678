"""Build evaluators by name."""

from trainkit.config.config import CfgNode
from trainkit.evaluation.evaluator import DatasetEvaluator, DatasetEvaluators
from trainkit.utils.errors import look_up, not_accepted
from trainkit.utils.registry import Registry

EVALUATOR_REGISTRY = Registry("EVALUATOR")
"""Classes or functions that take ``(cfg, dataset_name)`` and return a ``DatasetEvaluator``."""


def build_evaluator(cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
    """Build the evaluators of ``cfg.TEST.EVALUATORS``; several become one ``DatasetEvaluators``.

    Raises:
        ConfigError: ``cfg.TEST.EVALUATORS`` is empty, or nothing is registered under a name.
    """
    names = cfg.TEST.EVALUATORS
    if not names:
        raise not_accepted(
            "TEST.EVALUATORS", names, f"names such as LossEvaluator, to evaluate {dataset_name!r}"
        )
    evaluators = [
        look_up(EVALUATOR_REGISTRY, name, "TEST.EVALUATORS")(cfg, dataset_name) for name in names
    ]
    return evaluators[0] if len(evaluators) == 1 else DatasetEvaluators(evaluators)
