"""Batches of samples of the same group."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from trainkit.data.samplers.infinite import InfiniteSampler

logger = logging.getLogger(__name__)


class GroupedBatchSampler(Sampler[list[int]]):
    """Batches whose samples are of one group, yielded in the order in which they become full.

    When a finite sampler ends, samples of batches that are not full are left out. Only with an `InfiniteSampler` there
    is a state; otherwise the methods for it raise TypeError.

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
        self._start_with: dict[int, list[int]] = {}  # batches of a loaded state that are not full
        self._open: dict[int, list[int]] = {}
        self._num_drawn = 0
        self._group_ids: list[int] = groups.tolist()

    def __iter__(self) -> Iterator[list[int]]:
        self._num_drawn = 0
        self._open = open_batches = _copy(self._start_with)
        for index in self.sampler:
            self._num_drawn += 1
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

    @property
    def stream_start(self) -> int:
        """Samples of the global stream in all batches before the next ``iter()``; only with an `InfiniteSampler`."""
        sampler = self._endless()
        return sampler.start - sampler.world_size * sum(map(len, self._start_with.values()))

    def state_dict(self) -> dict[str, Any]:
        """The sampler's position after the last yielded batch, and the samples in batches that are not full."""
        sampler = self._endless()
        drawn = sampler.state_dict(sampler.start + self._num_drawn * sampler.world_size)
        return {"sampler": drawn, "open": _copy(self._open), "world_size": sampler.world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at this position with the next ``iter()``; another world size drops batches that are not full."""
        sampler = self._endless()
        sampler.load_state_dict(state["sampler"])
        self._num_drawn = 0
        self._start_with = _copy(state["open"])
        if state["world_size"] != sampler.world_size:
            logger.warning(
                "The samples in batches that are not full cannot be moved from %d to %d ranks; they are left out",
                state["world_size"],
                sampler.world_size,
            )
            self._start_with = {}
        self._open = self._start_with

    def _endless(self) -> InfiniteSampler:
        if not isinstance(self.sampler, InfiniteSampler):
            raise TypeError(
                "GroupedBatchSampler has a state over an InfiniteSampler only, such as TrainingSampler, "
                f"got {type(self.sampler).__name__}"
            )
        return self.sampler


def _copy(batches: Mapping[int, list[int]]) -> dict[int, list[int]]:
    return {group: [*indices] for group, indices in batches.items()}
