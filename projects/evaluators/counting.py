"""The common part of evaluators that compare scores with labels and count."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.evaluation.evaluator import DatasetEvaluator
from trainkit.utils import comm


class CountingEvaluator(DatasetEvaluator):
    """Counts on the device of the scores; ``process`` does not wait for it.

    So labels out of range are counted and reported at the end.

    Args:
        dims: one letter per dimension of the scores, such as ``NC``; labels have the same dimensions except C.
        label_key, task: see the subclasses.
    """

    def __init__(self, dims: str, label_key: str, task: str) -> None:
        self._dims, self._label_key, self._task = dims, label_key, task
        self.reset()

    def reset(self) -> None:
        self._counts: list[Tensor] = []  # int64, of the shapes of `count_shapes`

    def count_shapes(self, num_classes: int) -> Sequence[tuple[int, ...]]:
        """The shapes of the counts: one with a row per class is the first, ``()`` for labels out of range the last.

        Raises:
            ValueError: so many classes do not fit the arguments.
        """
        raise NotImplementedError

    def compare(self, inputs: Any, outputs: Any) -> tuple[Tensor, Tensor, int]:
        """The scores and labels (int64) of a batch, and C; makes the counts in the first batch.

        Raises:
            TypeError: inputs or outputs have another form.
            KeyError: the labels are missing.
            ValueError: shapes do not match, or C differs from the arguments or from earlier batches.
        """
        scores = scores_of(outputs, self._dims)
        labels = labels_of(inputs, self._label_key, scores.device)
        num_classes = check_labels(labels, scores)
        if not self._counts:
            shapes = self.count_shapes(num_classes)
            self._counts = [torch.zeros(shape, dtype=torch.int64, device=scores.device) for shape in shapes]
        if (before := len(self._counts[0])) != num_classes:
            raise ValueError(f"scores have {num_classes} classes, those of the batches before had {before}")
        return scores, labels.long(), num_classes


def check_largest_k(largest_k: int, num_classes: int) -> None:
    if largest_k > num_classes:
        raise ValueError(f"topk has k = {largest_k}, but the model scores only {num_classes} classes")


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
