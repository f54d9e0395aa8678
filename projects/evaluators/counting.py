"""The common part of evaluators that compare scores with labels and count."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.evaluation.evaluator import DatasetEvaluator, KnownResults
from trainkit.evaluation.observer import for_details
from trainkit.utils import comm
from trainkit.utils.logger import format_table

logger = logging.getLogger(__name__)


class CountingEvaluator(DatasetEvaluator):
    """Counts on the device of the scores; ``process`` does not wait for it, so wrong labels are reported at the end.

    A batch is a mapping with labels under ``label_key``, a list of samples with one each, or several tensors, the last
    of which is the labels. Without the default key ``label``, ``labels`` is read. The model's output is scores, alone
    or under ``"logits"`` or ``"scores"``.
    """

    dims = "NC"  # one letter per dimension of the scores; labels have the same dimensions except C
    ignore_label: int | None = None  # labels to leave out; None: count all

    def __init__(self, label_key: str, task: str, class_names: Sequence[str] | None = None) -> None:
        self._label_key = label_key
        self._task = task
        self._class_names = class_names
        self.reset()

    def reset(self) -> None:
        self._counts: dict[str, Tensor] = {}

    def count_shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each count, int64."""
        raise NotImplementedError

    def compute_metrics(self, counts: Mapping[str, Tensor]) -> dict[str, float]:
        """Metrics by name, from the counts of all ranks on the CPU."""
        raise NotImplementedError

    def compare(self, inputs: Any, outputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The scores of a batch; its labels, int64, where those that do not count are 0; and which of them count."""
        scores = scores_of(outputs, self.dims)
        labels = labels_of(inputs, self._label_key).to(scores.device, non_blocking=True)
        num_classes = scores.shape[1]
        shape = [len(scores), *scores.shape[2:]]
        if list(labels.shape) != shape or labels.is_floating_point():
            raise ValueError(
                f"labels must be integers of shape {shape}, got {labels.dtype} of "
                f"{list(labels.shape)}"
            )
        self._make_counts(num_classes, scores.device)
        is_class = (labels >= 0) & (labels < num_classes)
        is_counted = torch.ones_like(is_class)
        if self.ignore_label is not None:
            is_counted = labels != self.ignore_label
        self._counts["bad labels"] += (is_counted & ~is_class).sum()
        valid = is_class & is_counted
        return scores, labels.long().where(valid, 0), valid

    def _make_counts(self, num_classes: int, device: torch.device) -> None:
        """Make the counts that are not there yet; ValueError if they are for another number of classes."""
        shapes = {**self.count_shapes(num_classes), "bad labels": ()}
        for name, shape in shapes.items():
            if name not in self._counts:
                self._counts[name] = torch.zeros(shape, dtype=torch.int64, device=device)
            elif self._counts[name].shape != shape:
                raise ValueError(
                    f"scores have {num_classes} classes, those of the batches before had "
                    "another number"
                )

    def count_predictions(self, labels: Tensor, predicted: Tensor, valid: Tensor) -> None:
        """Add to ``confusion[label, prediction]``."""
        confusion = self._counts["confusion"]
        entries = torch.where(valid, labels * len(confusion) + predicted, 0)
        ones = valid.flatten().long()  # 0 where a label does not count
        confusion.view(-1).index_add_(0, entries.flatten(), ones)

    def known_results(self) -> KnownResults | None:
        if type(self).evaluate is not CountingEvaluator.evaluate:
            return None  # a subclass that may report something else
        return {self._task: self.metric_names()}

    def metric_names(self) -> Sequence[str] | None:
        """The names that ``compute_metrics`` gives, if they are known before; None: they depend on the data."""
        return None

    def evaluate(self) -> dict[str, Any]:
        """``{task: metrics}`` of all ranks, on rank 0; ValueError, on every rank, if a label was out of range."""
        mine = {name: count.cpu() for name, count in self._counts.items()}
        counts: dict[str, Any] = {}
        for of_rank in comm.all_gather(mine):  # a rank without a batch has none
            for name, count in of_rank.items():
                counts[name] = counts.get(name, 0) + count
        num_bad_labels = int(counts.pop("bad labels"))
        if num_bad_labels:
            num_classes = len(next(iter(counts.values())))
            raise ValueError(f"{num_bad_labels} labels are not below {num_classes} classes")
        if not comm.is_main_process():
            return {}
        return {self._task: self.compute_metrics(counts)}

    def names(self, num_classes: int) -> Sequence[str]:
        names = self._class_names or [*map(str, range(num_classes))]
        if len(names) != num_classes:
            raise ValueError(
                f"class_names has {len(names)} names, but the model scores {num_classes} classes"
            )
        return names

    def log_classes(
        self, title: str, unit: str, confusion: Tensor, percentages: Mapping[str, Tensor]
    ) -> None:
        """Log a row for each class: its name, its number of ``unit``, and percentages ``[C]`` by name of the column."""
        columns = []
        for values in percentages.values():
            columns.append([_two_digits(value) for value in values.tolist()])
        names = self.names(len(confusion))
        numbers = confusion.sum(dim=1).tolist()
        rows = zip(names, numbers, *columns, strict=True)
        self.log_table(title, ["class", unit, *percentages], rows)

    def log_table(self, title: str, headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        align = ["left", *["right"] * (len(headers) - 1)]
        table = format_table(rows, headers, tablefmt="pipe", colalign=align, disable_numparse=True)
        logger.log(for_details(), "%s (%s):\n%s", title, self._task, table)


def _two_digits(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"


def scores_of(outputs: Any, dims: str) -> Tensor:
    """The scores in a model's output, see `CountingEvaluator`. Raises TypeError if it has none."""
    scores = outputs
    if isinstance(outputs, Mapping):
        scores = outputs.get("logits", outputs.get("scores"))
    if isinstance(scores, Tensor) and scores.ndim == len(dims):
        return scores
    accepted = f"scores [{', '.join(dims)}], alone or as 'logits' or 'scores'"
    found = getattr(scores, "shape", outputs)
    raise TypeError(f"the model must give {accepted}, got {found!s:.100}")


def labels_of(inputs: Any, key: str) -> Tensor:
    """The labels of a batch, see `CountingEvaluator`. Raises KeyError or TypeError if it has none."""
    samples = inputs if isinstance(inputs, list | tuple) else [inputs]
    if len(samples) > 1 and all(isinstance(entry, Tensor) for entry in samples):
        return samples[-1]
    if not all(isinstance(sample, Mapping) for sample in samples):
        raise TypeError(
            f"a batch must be a mapping with the key {key!r} or a list of such, got {inputs!r:.100}"
        )
    labels = []
    for sample in samples:
        is_of_hugging_face = key == "label" and key not in sample and "labels" in sample
        name = "labels" if is_of_hugging_face else key
        if name not in sample:
            raise KeyError(
                f"a batch has no entry {key!r} with the labels; it has {', '.join(map(str, sample))}"
            )
        labels.append(torch.as_tensor(sample[name]))
    return labels[0] if isinstance(inputs, Mapping) else torch.stack(labels)
