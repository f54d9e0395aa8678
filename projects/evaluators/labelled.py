"""The common part of evaluators that count the predictions of each label."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from trainkit.projects.evaluators.counting import CountingEvaluator, check_largest_k, sum_over_ranks

from trainkit.evaluation.observer import for_details
from trainkit.utils import comm
from trainkit.utils.logger import format_table

logger = logging.getLogger(__name__)


class LabelledEvaluator(CountingEvaluator):
    """Counts how often each class was predicted for each label; a subclass computes metrics from the counts.

    Args:
        dims: see `CountingEvaluator`.
        ignore_label: labels to leave out; None: count all.
        largest_k: number of highest scores that are compared with the label of a sample; 0: none.
    """

    def __init__(
        self,
        dims: str,
        class_names: Sequence[str] | None,
        label_key: str,
        task: str,
        *,
        ignore_label: int | None = None,
        largest_k: int = 0,
    ) -> None:
        self._class_names = None if class_names is None else list(class_names)
        self._ignore_label, self._largest_k = ignore_label, largest_k
        super().__init__(dims, label_key, task)

    def count_shapes(self, num_classes: int) -> Sequence[tuple[int, ...]]:
        """[C, C] label and prediction; [largest k] how often the label has the j-th highest score; [] labels out of
        range."""
        names = self._class_names
        if names is not None and len(names) != num_classes:
            raise ValueError(f"class_names has {len(names)} names, but the model scores {num_classes} classes")
        check_largest_k(self._largest_k, num_classes)
        return (num_classes, num_classes), (self._largest_k,), ()

    def process(self, inputs: Any, outputs: Any) -> None:
        """Count one batch; raises as `compare`."""
        scores, labels, num_classes = self.compare(inputs, outputs)
        confusion, hits_at, num_bad_labels = self._counts
        in_range = (labels >= 0) & (labels < num_classes)
        counted = labels != self._ignore_label if self._ignore_label is not None else torch.ones_like(in_range)
        valid = in_range & counted
        num_bad_labels += (counted & ~in_range).sum()
        if self._largest_k:
            ranked = scores.topk(self._largest_k, dim=1).indices
            predicted = ranked[:, 0]
            hits_at += (ranked == labels[:, None]).sum(dim=0)
        else:
            predicted = scores.argmax(dim=1)
        entries = torch.where(valid, labels * num_classes + predicted, 0)
        confusion.view(-1).index_add_(0, entries.flatten(), valid.flatten().to(torch.int64))

    def evaluate(self) -> dict[str, Any]:
        """Add the counts of all ranks, log tables of the classes, and compute the metrics.

        Returns:
            On rank 0 ``{task: metrics}``, on other ranks ``{}``.

        Raises:
            ValueError: nothing was counted, or a label was out of range; on every rank.
        """
        confusion, hits_at = sum_over_ranks(self._counts)
        if self._ignore_label is not None and not confusion.any():
            raise ValueError(f"every pixel has the ignore_label {self._ignore_label}")
        return {self._task: self.compute_metrics(confusion, hits_at)} if comm.is_main_process() else {}

    def compute_metrics(self, confusion: Tensor, hits_at: Tensor) -> dict[str, float]:
        """Metrics by name. ``confusion[label, prediction]`` and ``hits_at[j]``, see `count_shapes`, are on the CPU."""
        raise NotImplementedError

    def _names(self, confusion: Tensor) -> list[str]:
        return self._class_names or [str(label) for label in range(len(confusion))]

    def _log_classes(self, title: str, unit: str, confusion: Tensor, percentages: Mapping[str, Tensor]) -> None:
        """Log a row for each class: its name, its number of ``unit``, and percentages ``[C]`` by name of the column."""
        columns = [
            [f"{value:.2f}" if math.isfinite(value) else "-" for value in values.tolist()]
            for values in percentages.values()
        ]
        rows = zip(self._names(confusion), confusion.sum(dim=1).tolist(), *columns, strict=True)
        self._log_table(title, ["class", unit, *percentages], rows)

    def _log_table(self, title: str, headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        align = ["left", *["right"] * (len(headers) - 1)]
        table = format_table(rows, headers, tablefmt="pipe", colalign=align, disable_numparse=True)
        logger.log(for_details(), "%s (%s):\n%s", title, self._task, table)
