"""The number of samples in a batch."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def num_samples(batch: Any) -> int:
    """The first dimension of the first tensor; for a list of samples, its length."""
    if isinstance(batch, list) and not any(isinstance(entry, Tensor) for entry in batch):
        return len(batch)
    for leaf in tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise TypeError(f"a batch of type {type(batch).__name__} is no list of samples and holds no tensor to count")
