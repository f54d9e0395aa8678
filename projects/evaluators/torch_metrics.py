"""Metrics of torchmetrics, or of another package with the same methods."""

from collections.abc import Mapping
from typing import Any

from trainkit.projects.evaluators.counting import labels_of

from trainkit.evaluation.evaluator import DatasetEvaluator
from trainkit.evaluation.testing import result_as_float
from trainkit.utils import comm


class TorchMetrics(DatasetEvaluator):
    """``TorchMetrics({"f1": MulticlassF1Score(10)})``, as the result of a trainer's ``build_evaluator``.

    A metric has ``to(device)``, ``reset()``, ``update(outputs, labels)`` and ``compute()``, which gives one number.
    Those of torchmetrics exchange what they have counted between ranks in ``compute()``. Labels are those that a
    `ClassificationEvaluator` reads: the entry ``label`` of a batch, else ``labels``, or the last tensor of a tuple. The
    results are under ``task``.
    """

    def __init__(
        self, metrics: Mapping[str, Any], *, label: str = "label", task: str = "metrics"
    ) -> None:
        self._metrics = dict(metrics)
        self._label = label
        self._task = task

    def reset(self) -> None:
        for metric in self._metrics.values():
            metric.reset()

    def process(self, inputs: Any, outputs: Any) -> None:
        labels = labels_of(inputs, self._label)
        for name, metric in self._metrics.items():
            on_device = metric.to(outputs.device)
            on_device.update(outputs, labels)
            self._metrics[name] = on_device

    def evaluate(self) -> dict[str, Any]:
        results = {}
        for name, metric in self._metrics.items():
            results[name] = result_as_float(f"{self._task}/{name}", metric.compute())
        return {self._task: results} if comm.is_main_process() else {}
