"""Predictions in values that JSON can hold."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

TOP_K = 3  # number of classes that are shown if classes have names
# entries of a sample that its line shows
TOLD = (
    "id",
    "image_id",
    "name",
    "file_name",
    "path",
    "label",
)
_MAX_VALUES = 16  # larger tensors are not printed


def write_lines(
    write: Callable[[str], object],
    predicted: Iterable[tuple[dict[str, Any], Any]],
    class_names: Sequence[Any],
    top_k: int | None,
) -> int:
    """One JSON object for each ``(names of a sample, its prediction)``; returns their number."""
    num_written = 0
    for told, prediction in predicted:
        row = {"sample": num_written, **told}
        label = told.get("label")
        if type(label) is int and 0 <= label < len(class_names):
            row["label"] = str(class_names[label])
        row["prediction"] = _with_nulls(describe(prediction, class_names, top_k))
        write(json.dumps(row, allow_nan=False) + "\n")
        num_written += 1
    return num_written


def describe(prediction: Any, class_names: Sequence[Any], top_k: int | None) -> Any:
    """A prediction in values that JSON can hold, except NaN and infinities.

    Args:
        top_k: number of classes; None: 3 if there are ``class_names``, else no classes.
    """
    if isinstance(prediction, Mapping):
        described = {}
        for name, value in prediction.items():
            described[str(name)] = describe(value, class_names, top_k)
        return described
    if isinstance(prediction, list | tuple):
        return [describe(value, class_names, top_k) for value in prediction]
    if isinstance(prediction, Tensor):
        return _describe_tensor(prediction, class_names, top_k)
    if isinstance(prediction, str | int | float | bool | None):
        return prediction
    return str(prediction)


def _describe_tensor(prediction: Tensor, class_names: Sequence[Any], top_k: int | None) -> Any:
    if prediction.is_floating_point() and prediction.ndim in (1, 3):
        num_classes = len(prediction)
        if num_classes == len(class_names):
            return _best_classes(prediction.float(), class_names, top_k or TOP_K)
        if top_k and prediction.ndim == 1:
            return _best_classes(prediction.float(), range(num_classes), top_k)
    if prediction.is_complex():
        return str(prediction)
    if prediction.numel() <= _MAX_VALUES:
        return prediction.tolist()
    values = prediction.double()
    return {
        "shape": list(prediction.shape),
        "min": values.min().item(),
        "max": values.max().item(),
        "mean": values.mean().item(),
    }


def _best_classes(scores: Tensor, names: Sequence[Any], top_k: int) -> list[dict[str, Any]]:
    """The best classes: of ``[C]`` with probabilities, of ``[C, H, W]`` with shares of pixels."""
    if scores.ndim == 1:
        what = "prob"
        are_probabilities = bool((scores >= 0).all()) and abs(scores.sum().item() - 1) < 1e-3
        shares = scores if are_probabilities else scores.softmax(dim=0)
    else:
        what = "pixels"
        counts = scores.argmax(dim=0).flatten().bincount(minlength=len(scores))
        shares = counts / scores[0].numel()
    values, indices = shares.topk(min(top_k, len(shares)))
    best = []
    for index, value in zip(indices.tolist(), values.tolist(), strict=True):
        if what == "prob" or value > 0:
            best.append({"class": str(names[index]), "index": index, what: round(value, 6)})
    return best


def _with_nulls(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot hold, by None."""
    if isinstance(value, dict):
        return {name: _with_nulls(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_nulls(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def told_of_sample(sample: Any) -> dict[str, Any]:
    """The names and the label of a sample, if it has them."""
    if not isinstance(sample, Mapping):
        return {}
    told = {}
    for name in TOLD:
        value: Any = sample.get(name)
        if getattr(value, "ndim", None) == 0:
            value = value.item()
        if type(value) in (int, str):
            told[name] = value
    return told


def told_of_batch(batch: Any, num: int) -> list[dict[str, Any]]:
    """The names and labels of the ``num`` samples of a batch, if it has them."""
    if isinstance(batch, list):
        return [told_of_sample(sample) for sample in batch]
    if not isinstance(batch, Mapping):
        return [{} for _ in range(num)]
    columns = {name: batch[name] for name in TOLD if name in batch and len(batch[name]) == num}
    told = []
    for i in range(num):
        told.append(told_of_sample({name: values[i] for name, values in columns.items()}))
    return told
