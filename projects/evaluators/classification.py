"""Accuracy and the confusion matrix of labels, and the intersection over union of pixels."""

import json
import logging
import os
import types
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from trainkit.projects.evaluators.counting import CountingEvaluator

from trainkit.checkpoint.atomic import write_text
from trainkit.config.config import CfgNode
from trainkit.config.from_config import configurable
from trainkit.data.catalog import Catalog
from trainkit.evaluation.build import EVALUATOR_REGISTRY
from trainkit.utils.events import get_event_storage, has_event_storage
from trainkit.utils.run_folder import is_owned


class Metadata(types.SimpleNamespace):
    """Facts about a dataset, such as its class names, as attributes that are set once (or again to an equal value)."""

    name: str = "N/A"

    def __init__(self, name: str | None = None, **attributes: Any) -> None:
        if name is not None:
            attributes["name"] = name
        super().__init__(**attributes)

    def __setattr__(self, key: str, value: Any) -> None:
        known = self.__dict__.setdefault(key, value)
        if known is not value and known != value:
            raise ValueError(
                f"metadata {key!r} of {self.name!r} is {known!r} and cannot become {value!r}"
            )

    def set(self, **attributes: Any) -> "Metadata":
        for key, value in attributes.items():
            setattr(self, key, value)
        return self

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)

    def as_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


class _MetadataCatalog(Catalog[Metadata]):
    """One `Metadata` per name, created when first used; the dataset need not be registered."""

    def get(self, name: str) -> Metadata:  # type: ignore[override]
        return self.setdefault(name, Metadata(name=name))


MetadataCatalog = _MetadataCatalog()


logger = logging.getLogger(__name__)


@EVALUATOR_REGISTRY.register()
class ClassificationEvaluator(CountingEvaluator):
    """Accuracy of one label per sample, in percent; see `CountingEvaluator` for batches and outputs.

    The results, under ``task``, are ``mean_class_accuracy``, the mean over the classes with samples, and for each k of
    ``topk`` a ``top<k>``: the label is among the k highest scores.
    """

    @configurable
    def __init__(
        self, topk: Sequence[int] = (1,), *, label_key: str = "label", task: str = "classification"
    ) -> None:
        self._topk = sorted(set(topk))
        super().__init__(label_key, task)

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset_name: str) -> dict[str, Any]:
        return {}

    def metric_names(self) -> Sequence[str] | None:
        if type(self).__module__ != __name__:
            return None  # a subclass that may report more
        return [*(f"top{k}" for k in self._topk), "mean_class_accuracy"]

    def count_shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        """``hits_at[j]``: how often the label has the j-th highest score."""
        most = self._topk[-1]
        return {"samples": (num_classes,), "right": (num_classes,), "hits_at": (most,)}

    def process(self, inputs: Any, outputs: Any) -> None:
        scores, labels, valid = self.compare(inputs, outputs)
        highest = scores.topk(self._topk[-1], dim=1)
        self.count(labels, highest.indices, valid)

    def count(self, labels: Tensor, ranked: Tensor, valid: Tensor) -> None:
        """``ranked``: the classes with the highest scores, the best first."""
        hits = ranked == labels[:, None]
        self._counts["samples"].index_add_(0, labels, valid.long())
        self._counts["right"].index_add_(0, labels, hits[:, 0].long())
        self._counts["hits_at"] += hits.sum(dim=0)

    def compute_metrics(self, counts: Mapping[str, Tensor]) -> dict[str, float]:
        samples = counts["samples"]
        num_samples = int(samples.sum())
        metrics: dict[str, float] = {}
        for k in self._topk:
            num_hits = int(counts["hits_at"][:k].sum())
            metrics[f"top{k}"] = 100.0 * num_hits / num_samples
        accuracy = 100.0 * counts["right"].double() / samples  # exact up to 2**53 samples
        of_present = accuracy[samples > 0].tolist()
        metrics["mean_class_accuracy"] = sum(of_present) / len(of_present)
        return metrics


@EVALUATOR_REGISTRY.register()
class ConfusionMatrixEvaluator(ClassificationEvaluator):
    """The results of a `ClassificationEvaluator`; logs a table of the classes, and writes the confusion matrix.

    The JSON ``confusion_file`` is written for up to 200 classes: ``confusion[label][prediction]`` is a number of
    samples; with ``class_names``, ``task`` and the ``iteration`` of the results. A run writes
    ``OUTPUT_DIR/confusion_<dataset>.json``, unless TEST.MAX_BATCHES is set; ``--eval-only`` does not.
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
        super().__init__(topk, label_key=label_key, task=task)
        self._class_names = class_names
        self._confusion_file = confusion_file

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset_name: str) -> dict[str, Any]:
        file = ""
        if is_owned(cfg.OUTPUT_DIR) and not cfg.TEST.MAX_BATCHES:
            name = dataset_name.replace("/", "_")
            file = os.path.join(cfg.OUTPUT_DIR, f"confusion_{name}.json")
        return {
            "class_names": MetadataCatalog.get(dataset_name).get("class_names"),
            "confusion_file": file,
        }

    def count_shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        return {**super().count_shapes(num_classes), "confusion": (num_classes, num_classes)}

    def count(self, labels: Tensor, ranked: Tensor, valid: Tensor) -> None:
        super().count(labels, ranked, valid)
        self.count_predictions(labels, ranked[:, 0], valid)

    def compute_metrics(self, counts: Mapping[str, Tensor]) -> dict[str, float]:
        confusion = counts["confusion"]
        accuracy = 100.0 * counts["right"].double() / counts["samples"]  # 0 / 0 is NaN
        self.log_classes(
            "Accuracy of each class in percent", "samples", confusion, {"accuracy": accuracy}
        )
        names = [*self.names(len(confusion))]
        matrix = confusion.tolist()
        if len(names) <= 10:
            rows = [(name, *row) for name, row in zip(names, matrix, strict=True)]
            self.log_table("Samples of each label by their prediction", ["label", *names], rows)
        if self._confusion_file and len(names) <= 200:
            self._write(names, matrix)
        return super().compute_metrics(counts)

    def _write(self, names: list[str], matrix: list[list[int]]) -> None:
        content = {
            "task": self._task,
            "iteration": get_event_storage().iter if has_event_storage() else None,
            "class_names": names,
            "confusion": matrix,
        }
        try:
            write_text(json.dumps(content), self._confusion_file)
        except OSError as error:
            logger.warning("The confusion matrix is not written: %s", error)


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
        return {
            "class_names": metadata.get("class_names"),
            "ignore_label": metadata.get("ignore_label", 255),
        }

    def count_shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        return {"confusion": (num_classes, num_classes)}

    def process(self, inputs: Any, outputs: Any) -> None:
        scores, labels, valid = self.compare(inputs, outputs)
        self.count_predictions(labels, scores.argmax(dim=1), valid)

    def compute_metrics(self, counts: Mapping[str, Tensor]) -> dict[str, float]:
        confusion = counts["confusion"].double()  # exact up to 2**53 pixels
        right = confusion.diagonal()
        labelled = confusion.sum(dim=1)
        predicted = confusion.sum(dim=0)
        iou = 100.0 * right / (labelled + predicted - right)  # 0 / 0 is NaN
        accuracy = 100.0 * right / labelled
        columns = {"IoU": iou, "accuracy": accuracy}
        self.log_classes("Each class in percent", "pixels", counts["confusion"], columns)
        metrics = {
            "mIoU": iou.nanmean(),
            "aAcc": 100.0 * right.sum() / labelled.sum(),
            "mAcc": accuracy.nanmean(),
        }
        for name, value in zip(self.names(len(iou)), iou, strict=True):
            metrics[f"IoU-{name}"] = value
        return {name: value.item() for name, value in metrics.items()}
