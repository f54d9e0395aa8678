"""Samplers that draw all samples, or the first samples of an order, once per epoch."""

from collections.abc import Mapping
from typing import Any

import torch

from trainkit.config.config import CfgNode
from trainkit.config.from_config import configurable
from trainkit.data.samplers.infinite import InfiniteSampler, new_generator, seed_of


class TrainingSampler(InfiniteSampler):
    """All samples of a dataset, in a new order each epoch, without end.

    Args:
        size: samples in the dataset.
        shuffle: False draws them in their own order.
        seed: as for ``InfiniteSampler``.

    Raises:
        ValueError: ``size`` is less than 1, or the seed is negative.
    """

    @configurable
    def __init__(self, size: int, shuffle: bool = True, seed: int | None = None) -> None:
        super().__init__(seed)
        if size < 1:
            raise ValueError(f"size must be >= 1 sample, got {size}: an empty dataset cannot be trained on")
        self._size = size
        self._shuffle = shuffle

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset: Any) -> dict[str, Any]:
        return {"size": len(dataset), "seed": seed_of(cfg)}

    @property
    def samples_per_epoch(self) -> int:
        return self._size

    def epoch_indices(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._size)
        return torch.randperm(self._size, generator=new_generator(self.seed, 0, epoch))


class LimitedSampler(InfiniteSampler):
    """The first samples of each epoch of ``sampler``, without end.

    Args:
        sampler: its epochs have at least ``samples_per_epoch`` samples.
        size: the largest number of samples in an epoch, over all ranks.
        repeat_first: every epoch is the start of the first epoch, in the same order.
    """

    def __init__(self, sampler: InfiniteSampler, size: int, *, repeat_first: bool = False) -> None:
        super().__init__(sampler.seed)
        self._sampler, self._size, self._repeat_first = sampler, size, repeat_first

    @property
    def samples_per_epoch(self) -> int:
        return min(self._size, self._sampler.samples_per_epoch)

    def epoch_indices(self, epoch: int) -> torch.Tensor:
        return self._sampler.epoch_indices(0 if self._repeat_first else epoch)[: self.samples_per_epoch]

    def state_dict(self, position: int | None = None) -> dict[str, int]:
        return {**self._sampler.state_dict(0), **super().state_dict(position)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._sampler.load_state_dict({**state, "position": 0})
        self.seed = self._sampler.seed
        self.set_position(state["position"])
