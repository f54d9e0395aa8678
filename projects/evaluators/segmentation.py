"""Intersection over union and accuracy of one label per pixel."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from trainkit.projects.evaluators.labelled import LabelledEvaluator
from trainkit.projects.evaluators.metadata import MetadataCatalog

from trainkit.config.config import CfgNode
from trainkit.config.from_config import configurable
from trainkit.evaluation.build import EVALUATOR_REGISTRY


@EVALUATOR_REGISTRY.register()
class SemSegEvaluator(LabelledEvaluator):
    """Mean intersection over union, and accuracies, of semantic segmentation, in percent.

    A batch is a mapping with labels ``[N, H, W]`` under ``label_key``, or a list of N samples with ``[H, W]`` each. The
    model's output is scores ``[N, C, H, W]``, alone or under ``"logits"`` or ``"scores"``. H and W may differ between
    batches.

    The results are ``mIoU``, ``aAcc``, ``mAcc`` and ``IoU-<class>``. The IoU of a class without labels and predictions
    is NaN and left out of the mean. ``aAcc`` is the accuracy over all pixels, ``mAcc`` the mean accuracy of the classes
    with labels.

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

    def compute_metrics(self, confusion: Tensor, hits_at: Tensor) -> dict[str, float]:
        counts = confusion.double()  # exact up to 2**53 pixels
        right, labelled, predicted = counts.diagonal(), counts.sum(dim=1), counts.sum(dim=0)
        iou = 100.0 * right / (labelled + predicted - right)  # 0 / 0 is NaN
        accuracy = 100.0 * right / labelled
        self._log_classes("Each class in percent", "pixels", confusion, {"IoU": iou, "accuracy": accuracy})
        metrics = {
            "mIoU": iou.nanmean().item(),
            "aAcc": (100.0 * right.sum() / labelled.sum()).item(),
            "mAcc": accuracy.nanmean().item(),
        }
        by_class = zip(self._names(confusion), iou.tolist(), strict=True)
        return metrics | {f"IoU-{name}": value for name, value in by_class}
