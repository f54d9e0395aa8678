"""Intersection over union and accuracy of one label per pixel."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from trainkit.projects.evaluators.counting import CountingEvaluator
from trainkit.projects.evaluators.metadata import MetadataCatalog

from trainkit.config.config import CfgNode
from trainkit.config.from_config import configurable
from trainkit.evaluation.build import EVALUATOR_REGISTRY


@EVALUATOR_REGISTRY.register()
class SemSegEvaluator(CountingEvaluator):
    """Mean intersection over union, and accuracies, of semantic segmentation, in percent.

    Labels are ``[N, H, W]``, scores ``[N, C, H, W]``, see `CountingEvaluator`. H and W may differ between batches.

    The results are ``mIoU``, ``aAcc``, ``mAcc`` and ``IoU-<class>``. The IoU of a class without labels and predictions
    is NaN and left out of the mean. ``aAcc`` is the accuracy over all pixels, ``mAcc`` the mean accuracy of the classes
    with labels. Pixels with the ``ignore_label`` do not count.
    """

    dims = "NCHW"

    @configurable
    def __init__(
        self,
        class_names: Sequence[str] | None = None,
        ignore_label: int = 255,
        *,
        label_key: str = "label",
        task: str = "sem_seg",
    ) -> None:
        self.ignore_label = ignore_label
        super().__init__(label_key, task, class_names)

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset_name: str) -> dict[str, Any]:
        metadata = MetadataCatalog.get(dataset_name)
        return {"class_names": metadata.get("class_names"), "ignore_label": metadata.get("ignore_label", 255)}

    def count_shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        return {"confusion": (num_classes, num_classes)}

    def process(self, inputs: Any, outputs: Any) -> None:
        scores, labels, valid = self.compare(inputs, outputs)
        self.count_predictions(labels, scores.argmax(dim=1), valid)

    def compute_metrics(self, counts: Mapping[str, Tensor]) -> dict[str, float]:
        confusion = counts["confusion"].double()  # exact up to 2**53 pixels
        right, labelled, predicted = confusion.diagonal(), confusion.sum(dim=1), confusion.sum(dim=0)
        iou = 100.0 * right / (labelled + predicted - right)  # 0 / 0 is NaN
        accuracy = 100.0 * right / labelled
        self.log_classes("Each class in percent", "pixels", counts["confusion"], {"IoU": iou, "accuracy": accuracy})
        means = {"mIoU": iou.nanmean(), "aAcc": 100.0 * right.sum() / labelled.sum(), "mAcc": accuracy.nanmean()}
        by_class = {f"IoU-{name}": value for name, value in zip(self.names(len(iou)), iou, strict=True)}
        return {name: value.item() for name, value in (means | by_class).items()}
