"""Intersection over union and accuracy of one label per pixel."""

import math
from collections.abc import Sequence
from typing import Any

from trainkit.config.config import CfgNode
from trainkit.config.configurable import configurable
from trainkit.data.catalog import MetadataCatalog
from trainkit.evaluation.labelled import LabelledEvaluator
from trainkit.utils import comm


class SemSegEvaluator(LabelledEvaluator):
    """Mean intersection over union, and accuracies, of semantic segmentation, in percent.

    A batch is a mapping with labels ``[N, H, W]`` under ``label_key``, or a list of N samples with ``[H, W]`` each. The
    model's output is scores ``[N, C, H, W]``, bare or under ``"logits"`` or ``"scores"``. H and W may differ between
    batches.

    Args:
        class_names: C names for the results and the table; None: their numbers.
        ignore_label: pixels with this label do not count.
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
                f"ignore_label must be an integer, got {ignore_label!r}; to ignore nothing, use a number that is no "
                "label"
            )
        if class_names is not None and len(set(class_names)) < len(class_names):
            raise ValueError(f"class_names must differ, as they name the results, got {list(class_names)}")
        super().__init__("NCHW", class_names, label_key, task, ignore_label=ignore_label)

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset_name: str) -> dict[str, Any]:
        metadata = MetadataCatalog.get(dataset_name)
        return {"class_names": metadata.get("class_names"), "ignore_label": metadata.get("ignore_label", 255)}

    def evaluate(self) -> dict[str, Any]:
        """Combine the ranks and log the table of classes.

        Returns:
            On rank 0 ``{task: {"mIoU": ..., "aAcc": ..., "mAcc": ..., "IoU-<class>": ...}}`` in percent, on other ranks
            ``{}``. The IoU of a class without labels and predictions is NaN and left out of the mean. ``aAcc`` is the
            accuracy over all pixels, ``mAcc`` the mean accuracy of the labelled classes.

        Raises:
            ValueError: no pixel was counted, or a label was neither in [0, C) nor ``ignore_label``.
        """
        confusion = self.sum_over_ranks()[0].double()  # exact up to 2**53 pixels
        if not confusion.any():
            raise ValueError(
                f"every pixel has the ignore_label {self._ignore_label}, so there is nothing to evaluate; give another"
            )
        if not comm.is_main_process():
            return {}
        right, labelled, predicted = confusion.diagonal(), confusion.sum(dim=1), confusion.sum(dim=0)
        iou = 100.0 * right / (labelled + predicted - right)  # 0 / 0 is NaN
        accuracy = 100.0 * right / labelled
        names = self._names(confusion)
        columns = [
            [f"{value:.2f}" if math.isfinite(value) else "-" for value in values.tolist()] for values in (iou, accuracy)
        ]
        rows = list(zip(names, labelled.long().tolist(), *columns, strict=True))
        self._log_table("Each class in percent", ["class", "pixels", "IoU", "accuracy"], rows)
        metrics = {
            "mIoU": iou.nanmean().item(),
            "aAcc": (100.0 * right.sum() / labelled.sum()).item(),
            "mAcc": accuracy.nanmean().item(),
        }
        return {self._task: metrics | {f"IoU-{name}": value for name, value in zip(names, iou.tolist(), strict=True)}}
