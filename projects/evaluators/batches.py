"""The number of samples in a batch."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def num_samples(batch: Any) -> int:
    """The first dimension of the first tensor; for a list of samples without tensors, its length.

    Raises:
        TypeError: the batch is not a list of samples, and holds no tensor.
    """
    if isinstance(batch, list) and not any(isinstance(entry, Tensor) for entry in batch):
        return len(batch)
    size = _leading_dimension(batch)
    if size is None:
        raise TypeError(
            f"cannot count the samples of a batch of type {type(batch).__name__}: it is no list of samples and holds "
            "no tensor; pass num_samples to LossEvaluator, or override count_samples() of Throughput"
        )
    return size


def _leading_dimension(data: Any) -> int | None:
    if isinstance(data, Tensor):
        return len(data) if data.dim() else None
    entries = data.values() if isinstance(data, Mapping) else data if isinstance(data, list | tuple) else ()
    return next((size for size in map(_leading_dimension, entries) if size is not None), None)
