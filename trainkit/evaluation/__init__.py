"""Evaluators, the evaluation loop, and their results."""

from trainkit.evaluation.build import EVALUATOR_REGISTRY, build_evaluator
from trainkit.evaluation.evaluator import (
    DatasetEvaluator,
    DatasetEvaluators,
    inference_context,
    inference_on_dataset,
)
from trainkit.evaluation.observer import observe_inference
from trainkit.evaluation.testing import flatten_results_dict, print_csv_format, verify_results
from trainkit.utils.loading import names_on_demand

_OF_PROJECTS = ("ClassificationEvaluator", "LossEvaluator", "SemSegEvaluator")

__all__ = [
    "DatasetEvaluator",
    "DatasetEvaluators",
    "EVALUATOR_REGISTRY",
    "build_evaluator",
    "inference_on_dataset",
]
__all__ += [
    "inference_context",
    "observe_inference",
    "print_csv_format",
    "flatten_results_dict",
    "verify_results",
]
__all__ += _OF_PROJECTS

__getattr__ = names_on_demand(__name__, *_OF_PROJECTS)
