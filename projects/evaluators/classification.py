"""Top-k and mean class accuracy."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.config.config import CfgNode
from trainkit.config.from_config import configurable
from trainkit.evaluation.build import EVALUATOR_REGISTRY
from trainkit.evaluation.evaluator import DatasetEvaluator
from trainkit.utils import comm


@EVALUATOR_REGISTRY.register()
class ClassificationEvaluator(DatasetEvaluator):
    """Accuracy of one label per sample, in percent.

    A batch is a mapping with labels ``[N]`` under ``label_key``, or a list of N samples with one label each. The
    model's output is scores ``[N, C]``, alone or under ``"logits"`` or ``"scores"``. The counts stay on the device of
    the scores, and ``process`` does not wait for this device. So labels out of range are reported at the end.

    The results are ``top<k>`` and ``mean_class_accuracy``, the mean over the classes with samples.

    Args:
        topk: each k gives a metric ``top<k>``: the label is among the k highest scores.
        task: the key of the results.
    """

    @configurable
    def __init__(self, topk: Sequence[int] = (1,), *, label_key: str = "label", task: str = "classification") -> None:
        self._topk, self._label_key, self._task = check_topk(topk), label_key, task
        self.reset()

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset_name: str) -> dict[str, Any]:
        return {}

    def reset(self) -> None:
        # int64: [C] samples of each class; [C] those with the highest score; [largest k] how often the label has the
        # j-th highest score; [] labels out of range
        self._counts: list[Tensor] = []

    def process(self, inputs: Any, outputs: Any) -> None:
        """Count one batch.

        Raises:
            TypeError: inputs or outputs have another form.
            KeyError: the labels are missing.
            ValueError: shapes do not match, or C differs from earlier batches or is less than the largest k.
        """
        scores = scores_of(outputs, "NC")
        labels = labels_of(inputs, self._label_key, scores.device)
        num_classes, largest_k = check_labels(labels, scores), self._topk[-1]
        if largest_k > num_classes:
            raise ValueError(f"topk has k = {largest_k}, but the model scores only {num_classes} classes")
        if not self._counts:
            shapes: tuple[tuple[int, ...], ...] = ((num_classes,), (num_classes,), (largest_k,), ())
            self._counts = [torch.zeros(shape, dtype=torch.int64, device=scores.device) for shape in shapes]
        samples, right, hits_at, num_bad_labels = self._counts
        if len(samples) != num_classes:
            raise ValueError(f"scores have {num_classes} classes, those of the batches before had {len(samples)}")
        labels = labels.long()
        valid = (labels >= 0) & (labels < num_classes)
        entries = labels.where(valid, 0)
        hits = scores.topk(largest_k, dim=1).indices == labels[:, None]
        samples.index_add_(0, entries, valid.long())
        right.index_add_(0, entries, hits[:, 0].long())
        hits_at += hits.sum(dim=0)
        num_bad_labels += (~valid).sum()

    def evaluate(self) -> dict[str, Any]:
        """Add the counts of all ranks, and compute the metrics.

        Returns:
            On rank 0 ``{task: metrics}``, on other ranks ``{}``.

        Raises:
            ValueError: nothing was counted, or a label was out of range; on every rank.
        """
        samples, right, hits_at = sum_over_ranks(self._counts)
        if not comm.is_main_process():
            return {}
        present = (100.0 * right.double() / samples)[samples > 0].tolist()  # exact up to 2**53 samples
        metrics = {f"top{k}": 100.0 * int(hits_at[:k].sum()) / int(samples.sum()) for k in self._topk}
        return {self._task: {**metrics, "mean_class_accuracy": sum(present) / len(present)}}


def sum_over_ranks(counts: Sequence[Tensor]) -> list[Tensor]:
    """The counts of all ranks but the last one, the number of labels out of range, on the CPU; every rank calls it.

    Raises:
        ValueError: nothing was counted, or a label was out of range; on every rank.
    """
    parts = [part for part in comm.all_gather([count.cpu() for count in counts]) if part]
    if not parts:
        raise ValueError("no batch was processed on any rank; call process() before evaluate()")
    *sums, num_bad_labels = (sum(column[1:], column[0]) for column in zip(*parts, strict=True))
    if num_bad_labels:
        raise ValueError(f"{int(num_bad_labels)} labels are outside [0, {len(sums[0])}), the classes of the model")
    return sums


def check_topk(topk: Sequence[int]) -> list[int]:
    """The numbers in order. Raises ValueError if there is none, or one of them is no positive integer."""
    if not topk or any(type(k) is not int or k < 1 for k in topk):
        raise ValueError(f"topk must hold one or more integers >= 1, got {topk!r}")
    return sorted(set(topk))


def check_labels(labels: Tensor, scores: Tensor) -> int:
    """The number of classes C. Raises ValueError if labels are not integers of the shape of scores without C."""
    shape = [len(scores), *scores.shape[2:]]
    if list(labels.shape) != shape or labels.is_floating_point():
        raise ValueError(f"labels must be integers of shape {shape}, got {labels.dtype} of {list(labels.shape)}")
    return scores.shape[1]


def scores_of(outputs: Any, dims: str) -> Tensor:
    """The scores in a model's output, alone or under "logits" or "scores".

    Raises:
        KeyError: a mapping has neither key.
        TypeError: the scores are not a tensor.
        ValueError: the scores have another number of dimensions.
    """
    scores, shape = outputs, f"[{', '.join(dims)}]"
    if isinstance(outputs, Mapping):
        key = next((key for key in ("logits", "scores") if key in outputs), None)
        if key is None:
            raise KeyError(f"the model's output must have 'logits' or 'scores', got {sorted(map(str, outputs))}")
        scores = outputs[key]
    if not isinstance(scores, Tensor):
        raise TypeError(f"the model must give scores {shape} in eval mode, got {type(scores).__name__}")
    if scores.ndim != len(dims):
        raise ValueError(f"scores must have the shape {shape}, got {list(scores.shape)}")
    return scores


def labels_of(inputs: Any, key: str, device: torch.device) -> Tensor:
    """The labels of a batch: under ``key`` of a mapping or of a list of mappings, else the last of several tensors.

    If ``key`` is ``label``, the default, and there is no ``label``, this reads ``labels``, as `losses_from` does.

    Raises:
        KeyError: there are no labels.
        TypeError: the batch has another form.
    """
    samples = inputs if isinstance(inputs, list | tuple) else [inputs]
    if len(samples) > 1 and all(isinstance(entry, Tensor) for entry in samples):
        return samples[-1].to(device)
    keys, labels = [key, "labels"] if key == "label" else [key], []  # Hugging Face calls them "labels"
    for sample in samples:
        if not isinstance(sample, Mapping):
            raise TypeError(f"a batch must be a mapping with the key {key!r} or a list of such, got {inputs!r:.100}")
        found = next((name for name in keys if name in sample), None)
        if found is None:
            raise KeyError(f"no labels under {key!r} (label_key), only {sorted(map(str, sample))}")
        labels.append(torch.as_tensor(sample[found]))
    together = labels[0] if isinstance(inputs, Mapping) else torch.stack(labels)
    return together.to(device, non_blocking=True)
