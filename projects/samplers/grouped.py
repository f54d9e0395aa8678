"""Batches of samples of the same group."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Sampler

from trainkit.data.samplers import InfiniteSampler

logger = logging.getLogger(__name__)


class GroupedBatchSampler(Sampler[list[int]]):
    """Batches whose samples are of one group, yielded in the order in which they become full.

    When a finite sampler ends, samples of batches that are not full are left out. Only with an `InfiniteSampler` there
    is a state. A resumed loader draws all indices again, without loading. ``group_ids`` holds the group of each sample,
    ``batch_size`` is that of this rank.
    """

    def __init__(
        self, sampler: Sampler[int], group_ids: Sequence[int] | np.ndarray | torch.Tensor, batch_size: int
    ) -> None:
        self.sampler, self.batch_size = cast(Any, sampler), batch_size
        self._group_ids: list[int] = np.asarray(group_ids).tolist()

    def __iter__(self) -> Iterator[list[int]]:
        open_batches: dict[int, list[int]] = {}
        for index in self.sampler:
            batch = open_batches.setdefault(group := self._group_ids[index], [])
            batch.append(index)
            if len(batch) == self.batch_size:
                yield open_batches.pop(group)

    @property
    def resume_obstacle(self) -> str:
        """See `trainkit.data.resume_obstacle`."""
        name, is_endless = type(self.sampler).__name__, isinstance(self.sampler, InfiniteSampler)
        return "" if is_endless else f"GroupedBatchSampler has no position in a {name}; use an endless sampler"

    def state_dict(self) -> dict[str, Any]:
        """Where the next ``iter()`` starts."""
        return {"sampler": self.sampler.state_dict(), "world_size": self.sampler.world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next ``iter()`` there."""
        self.sampler.load_state_dict(state["sampler"])
        if (saved := state["world_size"]) != (own := self.sampler.world_size):
            text = "The batches of %d ranks cannot be divided among %d; some samples may be repeated or left out"
            logger.warning(text, saved, own)
