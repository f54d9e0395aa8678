"""Batches of samples that belong together."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Sampler


class GroupedBatchSampler(Sampler[list[int]]):
    """Batches whose samples share a group, in the order in which a sampler fills them.

    Samples of a group that does not fill its last batch are left out when a finite sampler ends.

    Args:
        sampler: indices into ``group_ids``, finite or endless.
        group_ids: the group of each sample, integers ``[N]``.
        batch_size: samples per batch, of this rank.

    Raises:
        TypeError: ``sampler`` is no ``torch.utils.data.Sampler``.
        ValueError: ``group_ids`` is no vector, or ``batch_size`` is less than 1.
    """

    def __init__(
        self, sampler: Sampler[int], group_ids: Sequence[int] | np.ndarray | torch.Tensor, batch_size: int
    ) -> None:
        if not isinstance(sampler, Sampler):
            raise TypeError(f"sampler must be a torch.utils.data.Sampler, got {type(sampler).__name__}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1 sample, got {batch_size}")
        groups = np.asarray(group_ids)
        if groups.ndim != 1:
            raise ValueError(f"group_ids must be a vector with the group of each sample, got shape {groups.shape}")
        self.sampler = sampler
        self.batch_size = batch_size
        self._group_ids: list[int] = groups.tolist()

    def __iter__(self) -> Iterator[list[int]]:
        open_batches: defaultdict[int, list[int]] = defaultdict(list)
        for index in self.sampler:
            group = self._group_ids[index]
            open_batches[group].append(index)
            if len(open_batches[group]) == self.batch_size:
                yield open_batches.pop(group)
