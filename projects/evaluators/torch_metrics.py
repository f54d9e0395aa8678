"""Metrics of torchmetrics, or of another package with the same methods."""

from collections.abc import Mapping
from typing import Any

from trainkit.evaluation.evaluator import DatasetEvaluator
from trainkit.evaluation.testing import result_as_float
from trainkit.utils import comm


class TorchMetrics(DatasetEvaluator):
    """``TorchMetrics({"f1": MulticlassF1Score(10)})``, as the result of a trainer's ``build_evaluator``.

    A metric has ``to(device)``, ``reset()``, ``update(outputs, labels)`` and ``compute()``, which gives one number.
    Those of torchmetrics exchange what they have counted between ranks in ``compute()``. Labels are under the key
    ``label`` of a batch, and the results under ``task``.
    """

    def __init__(
        self, metrics: Mapping[str, Any], *, label: str = "label", task: str = "metrics"
    ) -> None:
        self._metrics, self._label, self._task = dict(metrics), label, task

    def reset(self) -> None:
        for metric in self._metrics.values():
            metric.reset()

    def process(self, inputs: Any, outputs: Any) -> None:
        for name, metric in self._metrics.items():
            self._metrics[name] = metric = metric.to(outputs.device)
            metric.update(outputs, inputs[self._label])

    def evaluate(self) -> dict[str, Any]:
        results = {}
        for name, metric in self._metrics.items():
            results[name] = result_as_float(f"{self._task}/{name}", metric.compute())
        return {self._task: results} if comm.is_main_process() else {}
