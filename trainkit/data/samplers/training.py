"""Samplers that draw all samples, a random subset, or the first samples of an order, once per epoch."""

from collections.abc import Mapping

import torch

from trainkit.data.samplers.infinite import InfiniteSampler, check_seed, new_generator
from trainkit.utils import comm

_SUBSET_KEY = 1  # epochs have the key 0, so the subset is independent of all orders


class TrainingSampler(InfiniteSampler):
    """All samples of a dataset, in a new order each epoch, without end.

    Args:
        size: samples in the dataset.
        shuffle: False draws them in their own order.
        seed: as for ``InfiniteSampler``.

    Raises:
        ValueError: ``size`` is less than 1, or the seed is negative.
    """

    def __init__(self, size: int, shuffle: bool = True, seed: int | None = None) -> None:
        super().__init__(seed)
        if size < 1:
            raise ValueError(f"size must be >= 1 sample, got {size}: an empty dataset cannot be trained on")
        self._size = size
        self._shuffle = shuffle

    @property
    def samples_per_epoch(self) -> int:
        return self._size

    def epoch_indices(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._size)
        return torch.randperm(self._size, generator=new_generator(self.seed, 0, epoch))


class RandomSubsetTrainingSampler(TrainingSampler):
    """A fixed random subset of the samples, in a new order each epoch, without end; an epoch is a pass over the subset.

    Args:
        size, shuffle: as for `TrainingSampler`.
        subset_ratio: fraction of the samples in the subset, in (0, 1].
        seed_shuffle, seed_subset: the seeds of the order and of the choice, see ``seed`` of ``InfiniteSampler``.

    Raises:
        ValueError: the ratio is out of range or leaves no sample, ``size`` is less than 1, or a seed is negative.
    """

    def __init__(
        self,
        size: int,
        subset_ratio: float,
        shuffle: bool = True,
        seed_shuffle: int | None = None,
        seed_subset: int | None = None,
    ) -> None:
        if not 0 < subset_ratio <= 1:
            raise ValueError(f"subset_ratio must be in (0, 1], got {subset_ratio}")
        subset_size = round(size * subset_ratio)
        if size >= 1 > subset_size:
            raise ValueError(f"subset_ratio {subset_ratio} of {size} samples leaves none; raise it")
        super().__init__(min(size, subset_size), shuffle, seed_shuffle)
        self.seed_subset = comm.shared_random_seed() if seed_subset is None else check_seed(seed_subset)
        self._dataset_size = size
        self.subset_indices = self._choose_subset()

    def _choose_subset(self) -> torch.Tensor:
        permutation = torch.randperm(self._dataset_size, generator=new_generator(self.seed_subset, _SUBSET_KEY))
        return permutation[: self.samples_per_epoch].sort().values

    def state_dict(self, position: int | None = None) -> dict[str, int]:
        return {**super().state_dict(position), "seed_subset": self.seed_subset}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        super().load_state_dict(state)
        self.seed_subset = check_seed(state["seed_subset"])
        self.subset_indices = self._choose_subset()

    def epoch_indices(self, epoch: int) -> torch.Tensor:
        return self.subset_indices[super().epoch_indices(epoch)]


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
