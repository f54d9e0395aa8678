"""Parts of a dataset: a random subset, or the start of each epoch."""

from collections.abc import Mapping
from typing import Any

import torch

from trainkit.config import CfgNode, configurable
from trainkit.data.build import SAMPLER_REGISTRY
from trainkit.data.samplers import InfiniteSampler, TrainingSampler, new_generator, seed_of
from trainkit.utils import comm


@SAMPLER_REGISTRY.register()
class RandomSubsetTrainingSampler(TrainingSampler):
    """A fixed random subset of the samples, in a new order each epoch, without end; an epoch is a pass over the subset.

    The subset is a fraction ``subset_ratio`` of the samples; for the other arguments see `TrainingSampler`.
    """

    @configurable
    def __init__(
        self,
        size: int,
        subset_ratio: float,
        shuffle: bool = True,
        seed_shuffle: int | None = None,
        seed_subset: int | None = None,
    ) -> None:
        subset_size = round(size * subset_ratio)
        if not 1 <= subset_size <= size:
            raise ValueError(f"subset_ratio {subset_ratio} of {size} samples is {subset_size}; it must be 1 to {size}")
        super().__init__(subset_size, shuffle, seed_shuffle)
        self._dataset_size = size
        self._choose(comm.shared_random_seed() if seed_subset is None else int(seed_subset))

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset: Any) -> dict[str, Any]:
        seed, ratio = seed_of(cfg), cfg.DATALOADER.RANDOM_SUBSET_RATIO
        return {"size": len(dataset), "subset_ratio": ratio, "seed_shuffle": seed, "seed_subset": seed}

    def _choose(self, seed: int) -> None:
        generator = new_generator(seed, 1)  # epochs have the key 0, so the subset is independent of all orders
        chosen = torch.randperm(self._dataset_size, generator=generator, device="cpu")[: self.samples_per_epoch]
        self.seed_subset, self.subset_indices = seed, chosen.sort().values

    def state_dict(self, position: int | None = None) -> dict[str, int]:
        return {**super().state_dict(position), "seed_subset": self.seed_subset}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        super().load_state_dict(state)
        self._choose(state["seed_subset"])

    def epoch_indices(self, epoch: int) -> torch.Tensor:
        return self.subset_indices[super().epoch_indices(epoch)]


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
