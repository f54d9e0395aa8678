"""Evaluators, the loop that feeds them, and what is done with their results."""

from trainkit.evaluation.build import EVALUATOR_REGISTRY, build_evaluator
from trainkit.evaluation.classification import ClassificationEvaluator
from trainkit.evaluation.evaluator import (
    DatasetEvaluator,
    DatasetEvaluators,
    inference_context,
    inference_on_dataset,
)
from trainkit.evaluation.loss import LossEvaluator
from trainkit.evaluation.observer import observe_inference
from trainkit.evaluation.segmentation import SemSegEvaluator
from trainkit.evaluation.testing import flatten_results_dict, print_csv_format, verify_results

__all__ = [
    "DatasetEvaluator",
    "DatasetEvaluators",
    "inference_context",
    "inference_on_dataset",
    "observe_inference",
    "ClassificationEvaluator",
    "LossEvaluator",
    "SemSegEvaluator",
    "EVALUATOR_REGISTRY",
    "build_evaluator",
    "flatten_results_dict",
    "print_csv_format",
    "verify_results",
]
