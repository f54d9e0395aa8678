"""Evaluators, the evaluation loop, and their results."""

from typing import Any

from trainkit.evaluation.build import EVALUATOR_REGISTRY, build_evaluator
from trainkit.evaluation.evaluator import (
    DatasetEvaluator,
    DatasetEvaluators,
    inference_context,
    inference_on_dataset,
)
from trainkit.evaluation.observer import observe_inference
from trainkit.evaluation.testing import flatten_results_dict, print_csv_format, verify_results
from trainkit.utils.plugins import lent_names, lent_object

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


def __getattr__(name: str) -> Any:
    return lent_object(__name__, name)


def __dir__() -> list[str]:
    return [*globals(), *lent_names(__name__)]
