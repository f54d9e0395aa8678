"""Top-k and per-class accuracy."""

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.config.config import CfgNode
from trainkit.config.configurable import configurable
from trainkit.data.catalog import MetadataCatalog
from trainkit.evaluation.evaluator import DatasetEvaluator
from trainkit.evaluation.labelled import check_class_names, labels_of, scores_of
from trainkit.utils import comm
from trainkit.utils.tables import format_table

logger = logging.getLogger(__name__)


class _Counts(NamedTuple):
    """Sums over samples, int64, on the device of the scores."""

    confusion: Tensor  # [C * C]; entry label * C + prediction
    hits_at: Tensor  # [largest k]; entry j: the label has the (j + 1)-th highest score
    num_bad_labels: Tensor  # []

    @classmethod
    def zeros(cls, num_classes: int, largest_k: int, device: torch.device) -> "_Counts":
        shapes: tuple[tuple[int, ...], ...] = ((num_classes**2,), (largest_k,), ())
        return cls(*(torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes))


class ClassificationEvaluator(DatasetEvaluator):
    """Accuracy of one label per sample, all in percent.

    A batch is a mapping with labels ``[N]`` under ``label_key``, or a list of N samples with one label each; the
    model's output is scores ``[N, C]``, bare or under ``"logits"`` or ``"scores"``. The counts stay on the device of
    the scores, and ``process`` does not wait for it.

    Args:
        topk: each k gives a metric ``top<k>``: samples whose label is among the k highest scores.
        class_names: C names for the table; None: their numbers.
        task: the key of the results.
    """

    @configurable
    def __init__(
        self,
        topk: Sequence[int] = (1,),
        class_names: Sequence[str] | None = None,
        *,
        label_key: str = "label",
        task: str = "classification",
    ) -> None:
        if not topk or any(type(k) is not int or k < 1 for k in topk):
            raise ValueError(f"topk must hold one or more integers >= 1, got {topk!r}")
        self._topk = sorted(set(topk))
        self._class_names = None if class_names is None else list(class_names)
        self._label_key, self._task = label_key, task
        self.reset()

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset_name: str) -> dict[str, Any]:
        return {"class_names": MetadataCatalog.get(dataset_name).get("class_names")}

    def reset(self) -> None:
        self._counts: _Counts | None = None

    def process(self, inputs: Any, outputs: Any) -> None:
        """Count one batch.

        Raises:
            TypeError: inputs or outputs are none of the forms above.
            KeyError: the labels are missing.
            ValueError: shapes do not fit, or C is less than the largest k or differs from the batches before.
        """
        scores = scores_of(outputs, "NC")
        labels = labels_of(inputs, self._label_key, scores.device)
        if labels.shape != scores.shape[:1] or labels.is_floating_point():
            raise ValueError(
                f"labels must be integers of shape [{len(scores)}] for scores {list(scores.shape)}, "
                f"got {labels.dtype} of shape {list(labels.shape)}"
            )
        num_classes = scores.shape[1]
        if self._counts is None:
            self._check_classes(num_classes)
            self._counts = _Counts.zeros(num_classes, self._topk[-1], scores.device)
        confusion, hits_at, num_bad_labels = self._counts
        if confusion.numel() != num_classes**2:
            raise ValueError(
                f"scores have {num_classes} classes, those of the batches before had {math.isqrt(confusion.numel())}; "
                "a model must score the same classes for each batch"
            )

        # A check of the labels' values here would wait for the device: bad ones are counted as such and
        # reported in the end.
        labels = labels.long()
        valid = (labels >= 0) & (labels < num_classes)
        ranked = scores.topk(self._topk[-1], dim=1).indices
        num_bad_labels += (~valid).sum()
        hits_at += (ranked == labels[:, None]).sum(dim=0)
        entries = torch.where(valid, labels * num_classes + ranked[:, 0], 0)
        confusion.index_add_(0, entries, valid.to(torch.int64))

    def evaluate(self) -> dict[str, Any]:
        """Combine the ranks and log the table of classes.

        Returns:
            On rank 0 ``{task: {"top<k>": ..., "mean_class_accuracy": ...}}`` in percent, the mean being over the
            classes that have samples; on the other ranks ``{}``.

        Raises:
            ValueError: no sample was processed, or a label was outside [0, C).
        """
        confusion, hits_at = self._sum_over_ranks()
        if not comm.is_main_process():
            return {}
        num_samples, num_right = confusion.sum(dim=1).tolist(), confusion.diagonal().tolist()
        per_class = [100.0 * right / max(samples, 1) for samples, right in zip(num_samples, num_right, strict=True)]
        self._log_table(num_samples, per_class)
        metrics = {f"top{k}": 100.0 * int(hits_at[:k].sum()) / sum(num_samples) for k in self._topk}
        present = [accuracy for samples, accuracy in zip(num_samples, per_class, strict=True) if samples]
        metrics["mean_class_accuracy"] = sum(present) / len(present)
        return {self._task: metrics}

    def _sum_over_ranks(self) -> tuple[Tensor, Tensor]:
        """``[C, C]`` confusion matrix and ``[largest k]`` hits, on the CPU."""
        mine = None if self._counts is None else [count.cpu() for count in self._counts]
        # Every rank gets everything, so that all of them raise the errors below.
        parts = [part for part in comm.all_gather(mine) if part is not None]
        if not parts:
            raise ValueError("no sample was processed on any rank, so there is no accuracy; call process() first")
        confusion, hits_at, num_bad_labels = (sum(column[1:], column[0]) for column in zip(*parts, strict=True))
        num_classes = math.isqrt(len(confusion))
        if num_bad_labels:
            raise ValueError(
                f"{int(num_bad_labels)} labels are outside [0, {num_classes}), the classes that the model scores; "
                "correct them, or give the model more classes"
            )
        return confusion.view(num_classes, num_classes), hits_at

    def _check_classes(self, num_classes: int) -> None:
        if self._topk[-1] > num_classes:
            raise ValueError(
                f"topk has k = {self._topk[-1]}, but the model scores only {num_classes} classes; leave that k out"
            )
        check_class_names(self._class_names, num_classes)

    def _log_table(self, num_samples: list[int], per_class: list[float]) -> None:
        names = self._class_names or [str(label) for label in range(len(per_class))]
        rows = [
            (name, samples, f"{accuracy:.2f}" if samples else "-")
            for name, samples, accuracy in zip(names, num_samples, per_class, strict=True)
        ]
        align = ["left", "right", "right"]
        table = format_table(
            rows, ["class", "samples", "accuracy"], tablefmt="pipe", colalign=align, disable_numparse=True
        )
        logger.info("Accuracy of each class in percent (%s):\n%s", self._task, table)
