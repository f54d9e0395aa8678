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
from trainkit.utils.plugins import lending

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

__getattr__, __dir__ = lending(__name__)
