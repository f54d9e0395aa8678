"""Where evaluators find scores and labels, and whether these have as many classes as names."""

from collections.abc import Mapping, Sized
from typing import Any

import torch
from torch import Tensor


def scores_of(outputs: Any, dims: str) -> Tensor:
    """What a model has returned, bare or under "logits" or "scores".

    Args:
        dims: a letter per dimension that scores must have, such as ``NC``.

    Raises:
        KeyError: a mapping has neither key.
        TypeError: they are no tensor.
        ValueError: they have another number of dimensions.
    """
    scores, shape = outputs, f"[{', '.join(dims)}]"
    if isinstance(outputs, Mapping):
        key = next((key for key in ("logits", "scores") if key in outputs), None)
        if key is None:
            raise KeyError(
                f"the model's output has neither 'logits' nor 'scores', only {sorted(map(str, outputs))}; give the "
                "scores one of these names"
            )
        scores = outputs[key]
    if not isinstance(scores, Tensor):
        raise TypeError(f"the model must give scores {shape} in eval mode, got {type(scores).__name__}")
    if scores.ndim != len(dims):
        raise ValueError(f"scores must have the shape {shape}, got {list(scores.shape)}")
    return scores


def labels_of(inputs: Any, key: str, device: torch.device) -> Tensor:
    """The labels of a batch, which is a mapping that has them under ``key``, or a list of such samples.

    Raises:
        KeyError: there are none.
        TypeError: the batch is neither.
    """
    samples = inputs if isinstance(inputs, list | tuple) else [inputs]
    for sample in samples:
        if not isinstance(sample, Mapping):
            raise TypeError(
                f"a batch must be a mapping with the key {key!r} or a list of such samples, "
                f"got {type(inputs).__name__}" + (f" of {type(sample).__name__}" if sample is not inputs else "")
            )
        if key not in sample:
            raise KeyError(
                f"no labels under {key!r} (keys: {sorted(map(str, sample))}); an evaluated data set "
                "must keep its labels, label_key says where"
            )
    if isinstance(inputs, Mapping):
        return torch.as_tensor(inputs[key], device=device)
    return torch.stack([torch.as_tensor(sample[key]) for sample in samples]).to(device, non_blocking=True)


def check_class_names(names: Sized | None, num_classes: int) -> None:
    """
    Raises:
        ValueError: there are names, but not one for each class.
    """
    if names is not None and len(names) != num_classes:
        raise ValueError(
            f"class_names has {len(names)} names, but the model scores {num_classes} classes; give each class one"
        )
