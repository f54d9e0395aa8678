"""Evaluators that count the predictions of each class."""

from trainkit.projects.evaluators.confusion import ConfusionMatrixEvaluator
from trainkit.projects.evaluators.labelled import LabelledEvaluator
from trainkit.projects.evaluators.segmentation import SemSegEvaluator

__all__ = ["ConfusionMatrixEvaluator", "LabelledEvaluator", "SemSegEvaluator"]
