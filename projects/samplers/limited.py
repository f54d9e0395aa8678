"""Epochs that end early."""

from collections.abc import Mapping
from typing import Any

import torch

from trainkit.config import CfgNode
from trainkit.data.build import SAMPLER_REGISTRY
from trainkit.data.samplers import InfiniteSampler


class LimitedSampler(InfiniteSampler):
    """The first ``size`` samples, over all ranks, of each epoch of ``sampler``, without end.

    With ``repeat_first`` every epoch is the start of the first epoch, in the same order.
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


@SAMPLER_REGISTRY.register()
def limited_sampler(cfg: CfgNode, dataset: Any) -> InfiniteSampler:
    """The sampler of the config, with its limit; DATALOADER.LIMITED is the name that `prepare` has replaced."""
    sampler: InfiniteSampler = SAMPLER_REGISTRY.get(cfg.DATALOADER.get("LIMITED", "TrainingSampler"))(cfg, dataset)
    repeats = cfg.DATALOADER.OVERFIT_BATCHES > 0
    num_batches = cfg.DATALOADER.OVERFIT_BATCHES or cfg.SOLVER.MAX_BATCHES_PER_EPOCH
    size = num_batches * cfg.SOLVER.ACCUMULATION_STEPS * cfg.SOLVER.IMS_PER_BATCH
    if repeats or 0 < size < sampler.samples_per_epoch:
        return LimitedSampler(sampler, size, repeat_first=repeats)
    return sampler
