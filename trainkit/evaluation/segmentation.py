"""Intersection over union, and accuracy, of one label per pixel."""

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
    """Sums over pixels, int64, on the device of the scores."""

    confusion: Tensor  # [C * C]; entry label * C + prediction
    num_bad_labels: Tensor  # []

    @classmethod
    def zeros(cls, num_classes: int, device: torch.device) -> "_Counts":
        shapes: tuple[tuple[int, ...], ...] = ((num_classes**2,), ())
        return cls(*(torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes))


class SemSegEvaluator(DatasetEvaluator):
    """Mean intersection over union, and accuracies, of semantic segmentation, all in percent.

    A batch is a mapping with labels ``[N, H, W]`` under ``label_key``, or a list of N samples with ``[H, W]`` each; the
    model's output is scores ``[N, C, H, W]``, bare or under ``"logits"`` or ``"scores"``. H and W may differ from batch
    to batch. The counts stay on the device of the scores, and ``process`` does not wait for it.

    Args:
        class_names: C names for the results and the table; None: their numbers.
        ignore_label: pixels with this label do not count, whatever is predicted there.
        task: the key of the results.
    """

    @configurable
    def __init__(
        self,
        class_names: Sequence[str] | None = None,
        ignore_label: int = 255,
        *,
        label_key: str = "label",
        task: str = "sem_seg",
    ) -> None:
        if type(ignore_label) is not int:
            raise TypeError(
                f"ignore_label must be an integer, got {ignore_label!r}; one that is no label ignores nothing"
            )
        if class_names is not None and len(set(class_names)) < len(class_names):
            raise ValueError(f"class_names must differ, as they name the results, got {list(class_names)}")
        self._class_names = None if class_names is None else list(class_names)
        self._ignore_label = ignore_label
        self._label_key, self._task = label_key, task
        self.reset()

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset_name: str) -> dict[str, Any]:
        metadata = MetadataCatalog.get(dataset_name)
        return {"class_names": metadata.get("class_names"), "ignore_label": metadata.get("ignore_label", 255)}

    def reset(self) -> None:
        self._counts: _Counts | None = None

    def process(self, inputs: Any, outputs: Any) -> None:
        """Count one batch.

        Raises:
            TypeError: inputs or outputs are none of the forms above.
            KeyError: the labels are missing.
            ValueError: shapes do not fit, or C is not the number of ``class_names`` or differs from the batches before.
        """
        scores = scores_of(outputs, "NCHW")
        labels = labels_of(inputs, self._label_key, scores.device)
        num_classes, predicted = scores.shape[1], scores.argmax(dim=1)
        if labels.shape != predicted.shape or labels.is_floating_point():
            raise ValueError(
                f"labels must be integers of shape {list(predicted.shape)} for scores {list(scores.shape)}, got "
                f"{labels.dtype} of shape {list(labels.shape)}; scores must have the size of the labels"
            )
        if self._counts is None:
            check_class_names(self._class_names, num_classes)
            self._counts = _Counts.zeros(num_classes, scores.device)
        confusion, num_bad_labels = self._counts
        if confusion.numel() != num_classes**2:
            raise ValueError(
                f"scores have {num_classes} classes, those of the batches before had {math.isqrt(confusion.numel())}; "
                "a model must score the same classes for each batch"
            )

        # A check of the labels' values here would wait for the device: bad ones are counted as such and
        # reported in the end.
        labels = labels.long()
        counted = labels != self._ignore_label
        valid = counted & (labels >= 0) & (labels < num_classes)
        num_bad_labels += (counted & ~valid).sum()
        entries = torch.where(valid, labels * num_classes + predicted, 0)
        confusion.index_add_(0, entries.flatten(), valid.flatten().to(torch.int64))

    def evaluate(self) -> dict[str, Any]:
        """Combine the ranks and log the table of classes.

        Returns:
            On rank 0 ``{task: {"mIoU": ..., "aAcc": ..., "mAcc": ..., "IoU-<class>": ...}}`` in percent, on the other
            ranks ``{}``. The IoU of a class that is nowhere labelled nor predicted is NaN and no part of the mean;
            ``aAcc`` is the share of all pixels that are right, ``mAcc`` its mean over the classes that are labelled.

        Raises:
            ValueError: no pixel was counted, or a label was neither in [0, C) nor ``ignore_label``.
        """
        confusion = self._sum_over_ranks().double()  # exact up to 2**53 pixels
        if not comm.is_main_process():
            return {}
        right, labelled, predicted = confusion.diagonal(), confusion.sum(dim=1), confusion.sum(dim=0)
        iou = 100.0 * right / (labelled + predicted - right)  # 0 / 0 is NaN
        accuracy = 100.0 * right / labelled
        names = self._class_names or [str(label) for label in range(len(confusion))]
        self._log_table(names, labelled, iou, accuracy)
        metrics = {
            "mIoU": iou.nanmean().item(),
            "aAcc": (100.0 * right.sum() / labelled.sum()).item(),
            "mAcc": accuracy.nanmean().item(),
        }
        return {self._task: metrics | {f"IoU-{name}": value for name, value in zip(names, iou.tolist(), strict=True)}}

    def _sum_over_ranks(self) -> Tensor:
        """``[C, C]`` confusion matrix, on the CPU."""
        mine = None if self._counts is None else [count.cpu() for count in self._counts]
        # Every rank gets everything, so that all of them raise the errors below.
        parts = [part for part in comm.all_gather(mine) if part is not None]
        if not parts:
            raise ValueError(
                "no batch was processed on any rank, so there is nothing to evaluate; call process() first"
            )
        confusion, num_bad_labels = (sum(column[1:], column[0]) for column in zip(*parts, strict=True))
        num_classes = math.isqrt(len(confusion))
        if num_bad_labels:
            raise ValueError(
                f"{int(num_bad_labels)} pixels have labels outside [0, {num_classes}), the classes that the model "
                f"scores, other than ignore_label {self._ignore_label}; correct them, or set ignore_label to theirs"
            )
        if not confusion.any():
            raise ValueError(
                f"every pixel has the ignore_label {self._ignore_label}, so there is nothing to evaluate; give another"
            )
        return confusion.view(num_classes, num_classes)

    def _log_table(self, names: list[str], labelled: Tensor, iou: Tensor, accuracy: Tensor) -> None:
        columns = [
            [f"{value:.2f}" if math.isfinite(value) else "-" for value in values.tolist()] for values in (iou, accuracy)
        ]
        rows = list(zip(names, labelled.long().tolist(), *columns, strict=True))
        headers, align = ["class", "pixels", "IoU", "accuracy"], ["left", "right", "right", "right"]
        table = format_table(rows, headers, tablefmt="pipe", colalign=align, disable_numparse=True)
        logger.info("Each class in percent (%s):\n%s", self._task, table)
