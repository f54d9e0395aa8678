"""Accuracies with the confusion matrix behind them."""

import json
import logging
import math
import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from trainkit.projects.evaluators.classification import check_topk
from trainkit.projects.evaluators.labelled import LabelledEvaluator
from trainkit.projects.evaluators.metadata import MetadataCatalog

from trainkit.checkpoint.atomic import write_text
from trainkit.config.config import CfgNode
from trainkit.config.from_config import configurable
from trainkit.evaluation.build import EVALUATOR_REGISTRY
from trainkit.utils.events import get_event_storage, has_event_storage
from trainkit.utils.run_folder import is_owned

logger = logging.getLogger(__name__)

_MOST_LOGGED, _MOST_WRITTEN = 10, 200  # the largest number of classes of a confusion matrix


@EVALUATOR_REGISTRY.register()
class ConfusionMatrixEvaluator(LabelledEvaluator):
    """The results of a `ClassificationEvaluator`; logs a table of the classes, and writes the confusion matrix.

    Args:
        topk: each k gives a metric ``top<k>``: the label is among the k highest scores.
        class_names: C names for the table; None: their numbers.
        task: the key of the results.
        confusion_file: a JSON file for the confusion matrix of up to 200 classes: ``confusion[label][prediction]`` is a
            number of samples; with ``class_names``, ``task`` and the ``iteration`` of the results. "": no file. A run
            writes ``OUTPUT_DIR/confusion_<dataset>.json``, unless TEST.MAX_BATCHES is set; ``--eval-only`` does not.
    """

    @configurable
    def __init__(
        self,
        topk: Sequence[int] = (1,),
        class_names: Sequence[str] | None = None,
        *,
        label_key: str = "label",
        task: str = "classification",
        confusion_file: str = "",
    ) -> None:
        self._topk, self._confusion_file = check_topk(topk), confusion_file
        super().__init__("NC", class_names, label_key, task, largest_k=self._topk[-1])

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset_name: str) -> dict[str, Any]:
        arguments = {"class_names": MetadataCatalog.get(dataset_name).get("class_names")}
        if is_owned(cfg.OUTPUT_DIR) and not cfg.TEST.MAX_BATCHES:
            name = f"confusion_{dataset_name.replace('/', '_')}.json"
            arguments["confusion_file"] = os.path.join(cfg.OUTPUT_DIR, name)
        return arguments

    def compute_metrics(self, confusion: Tensor, hits_at: Tensor) -> dict[str, float]:
        counts = confusion.double()  # exact up to 2**53 samples
        accuracy = 100.0 * counts.diagonal() / counts.sum(dim=1)  # 0 / 0 is NaN
        self._log_classes("Accuracy of each class in percent", "samples", confusion, {"accuracy": accuracy})
        self._show_confusion(confusion)
        present = [value for value in accuracy.tolist() if not math.isnan(value)]
        metrics = {f"top{k}": 100.0 * int(hits_at[:k].sum()) / int(confusion.sum()) for k in self._topk}
        return {**metrics, "mean_class_accuracy": sum(present) / len(present)}

    def _show_confusion(self, confusion: Tensor) -> None:
        """Log the matrix if it is small, and write its file."""
        names, counts = self._names(confusion), confusion.tolist()
        if len(names) <= _MOST_LOGGED:
            rows = [(name, *row) for name, row in zip(names, counts, strict=True)]
            self._log_table("Samples of each label by their prediction", ["label", *names], rows)
        if not self._confusion_file or len(names) > _MOST_WRITTEN:
            return
        iteration = get_event_storage().iter if has_event_storage() else None
        content = {"task": self._task, "iteration": iteration, "class_names": names, "confusion": counts}
        try:
            os.makedirs(os.path.dirname(os.path.abspath(self._confusion_file)), exist_ok=True)
            write_text(json.dumps(content), self._confusion_file)
        except OSError as error:
            logger.warning("The confusion matrix is not written: %s", error)
