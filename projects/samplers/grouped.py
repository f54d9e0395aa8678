"""Batches of samples of the same group."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from trainkit.data.samplers import InfiniteSampler

logger = logging.getLogger(__name__)


class GroupedBatchSampler(Sampler[list[int]]):
    """Batches whose samples are of one group, yielded in the order in which they become full.

    When a finite sampler ends, samples of batches that are not full are left out. Only with an `InfiniteSampler` there
    is a state; otherwise the methods for it raise TypeError. A resumed loader draws all indices again, without loading.

    Args:
        sampler: indices into ``group_ids``, finite or endless.
        group_ids: the group of each sample, integers ``[N]``.
        batch_size: samples per batch of this rank.

    Raises:
        TypeError: ``sampler`` is not a ``torch.utils.data.Sampler``.
        ValueError: ``group_ids`` is not a vector, or ``batch_size`` is less than 1.
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
        self._open: dict[int, list[int]] = {}  # batches that are not full before the next iter()
        self._group_ids: list[int] = groups.tolist()

    def __iter__(self) -> Iterator[list[int]]:
        open_batches = {group: [*indices] for group, indices in self._open.items()}
        for index in self.sampler:
            group = self._group_ids[index]
            batch = open_batches.setdefault(group, [])
            batch.append(index)
            if len(batch) >= self.batch_size:
                del open_batches[group]
                if rest := batch[self.batch_size :]:  # the batches of the state may be larger
                    open_batches[group] = rest
                yield batch[: self.batch_size]

    @property
    def resume_obstacle(self) -> str:
        """See `trainkit.data.resume_obstacle`."""
        name = type(self.sampler).__name__
        is_endless, remedy = isinstance(self.sampler, InfiniteSampler), "a sampler of trainkit.data for training"
        return "" if is_endless else f"GroupedBatchSampler has no position in a {name}; give it {remedy}"

    def state_dict(self) -> dict[str, Any]:
        """Where the next ``iter()`` starts."""
        sampler = self._endless()
        return {"sampler": sampler.state_dict(), "open": self._open, "world_size": sampler.world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next ``iter()`` there; another world size drops batches that are not full."""
        sampler = self._endless()
        sampler.load_state_dict(state["sampler"])
        self._open = state["open"]
        if state["world_size"] != sampler.world_size:
            logger.warning(
                "The batches of %d ranks cannot be divided among %d; some samples may be repeated or left out",
                state["world_size"],
                sampler.world_size,
            )
            self._open = {}

    def _endless(self) -> InfiniteSampler:
        if not isinstance(self.sampler, InfiniteSampler):
            raise TypeError(
                f"GroupedBatchSampler has a state over an InfiniteSampler only, got {type(self.sampler).__name__}"
            )
        return self.sampler
