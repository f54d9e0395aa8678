"""Evaluators: accuracy, losses, and the predictions of each class."""

from trainkit.projects.evaluators.classification import ConfusionMatrixEvaluator
from trainkit.projects.evaluators.segmentation import SemSegEvaluator

__all__ = ["ConfusionMatrixEvaluator", "SemSegEvaluator"]
