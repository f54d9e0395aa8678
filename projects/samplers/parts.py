"""Samplers of a random subset, of the start of each epoch, and of rare categories more often."""

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trainkit.config import CfgNode, ConfigError, configurable
from trainkit.data.build import SAMPLER_REGISTRY
from trainkit.data.samplers import InfiniteSampler, TrainingSampler, new_generator, seed_of
from trainkit.utils import comm
from trainkit.utils.periods import check_number, check_period


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
        check_number("subset_ratio", subset_ratio, "(0, 1]")
        subset_size = round(size * subset_ratio)
        if not 1 <= subset_size <= size:
            raise ValueError(
                f"subset_ratio {subset_ratio} of {size} samples is {subset_size}; it must be 1 "
                f"to {size}"
            )
        super().__init__(subset_size, shuffle, seed_shuffle)
        self._dataset_size = size
        if seed_subset is None:
            seed_subset = comm.shared_random_seed()
        self._choose(int(seed_subset))

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset: Any) -> dict[str, Any]:
        seed = seed_of(cfg)
        return {
            "size": len(dataset),
            "subset_ratio": cfg.DATALOADER.RANDOM_SUBSET_RATIO,
            "seed_shuffle": seed,
            "seed_subset": seed,
        }

    def _choose(self, seed: int) -> None:
        # epochs have the key 0, so the subset is independent of all orders
        generator = new_generator(seed, 1)
        order = torch.randperm(self._dataset_size, generator=generator, device="cpu")
        chosen = order[: self.samples_per_epoch]
        self.seed_subset = seed
        self.subset_indices = chosen.sort().values

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
        self._sampler = sampler
        self._repeat_first = repeat_first
        self._size = check_period("size", size, minimum=1)

    @property
    def samples_per_epoch(self) -> int:
        return min(self._size, self._sampler.samples_per_epoch)

    def epoch_indices(self, epoch: int) -> torch.Tensor:
        if self._repeat_first:
            epoch = 0
        indices = self._sampler.epoch_indices(epoch)
        return indices[: self.samples_per_epoch]

    def state_dict(self, position: int | None = None) -> dict[str, int]:
        return {**self._sampler.state_dict(0), **super().state_dict(position)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._sampler.load_state_dict({**state, "position": 0})
        self.seed = self._sampler.seed
        self.set_position(state["position"])


@SAMPLER_REGISTRY.register()
def limited_sampler(cfg: CfgNode, dataset: Any) -> InfiniteSampler:
    """The sampler of the config, with its limit; DATALOADER.LIMITED is the name that `prepare` has replaced."""
    builder = SAMPLER_REGISTRY.get(cfg.DATALOADER.get("LIMITED", "TrainingSampler"))
    sampler: InfiniteSampler = builder(cfg, dataset)
    repeats = cfg.DATALOADER.OVERFIT_BATCHES > 0
    num_batches = cfg.DATALOADER.OVERFIT_BATCHES or cfg.SOLVER.MAX_BATCHES_PER_EPOCH
    size = num_batches * cfg.SOLVER.ACCUMULATION_STEPS * cfg.SOLVER.IMS_PER_BATCH
    is_limited = repeats or 0 < size < sampler.samples_per_epoch
    if not is_limited:
        return sampler
    return LimitedSampler(sampler, size, repeat_first=repeats)


_BEFORE_ALL = (-1, 0, 0)  # (epoch, its first position in the stream, the position after it)


@SAMPLER_REGISTRY.register()
class RepeatFactorTrainingSampler(InfiniteSampler):
    """Draws each sample as often per epoch as its factor says, without end.

    The fractional part of a factor is the probability that the factor is rounded up. This is drawn again in each epoch,
    so epochs have different lengths; ``samples_per_epoch`` is still the size of the dataset. To find a position, the
    lengths of earlier epochs are drawn again, starting with the last known epoch; a state holds this epoch. Without
    ``shuffle`` samples are in the order of the dataset, with the repetitions of a sample in a row.
    """

    @configurable
    def __init__(
        self,
        repeat_factors: torch.Tensor | Sequence[float],
        *,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        factors = torch.as_tensor(repeat_factors, dtype=torch.float64, device="cpu")
        are_in_range = factors.isfinite().all() and (factors >= 0).all()
        if not are_in_range or not factors.any():
            raise ValueError(
                f"repeat_factors must be finite, >= 0 and not all 0, got {factors.tolist()!s:.99}"
            )
        self._whole = factors.floor().long()
        self._fraction = factors.frac()
        self._shuffle = shuffle
        self._located = _BEFORE_ALL

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset: Any) -> dict[str, Any]:
        """Read every sample once. Raises ConfigError if a sample lacks categories."""
        categories = [_categories_of(dataset[index]) for index in range(len(dataset))]
        factors = cls.repeat_factors_from_category_frequency(
            categories, cfg.DATALOADER.REPEAT_THRESHOLD, cfg.DATALOADER.REPEAT_SQRT
        )
        return {"repeat_factors": factors, "seed": seed_of(cfg)}

    @staticmethod
    def repeat_factors_from_category_frequency(
        dataset_dicts: Sequence[Collection[Hashable] | Mapping[str, Any]],
        repeat_thresh: float,
        sqrt: bool = True,
    ) -> torch.Tensor:
        """A factor for each sample, computed from its rarest category, float32 ``[N]``, >= 1.

        A category in a fraction f of the samples has the factor ``max(1, t / f)``, or ``max(1, sqrt(t / f))`` if
        ``sqrt``. A sample has the largest factor of its categories, and 1 without a category. Source: Gupta, Dollar and
        Girshick, "LVIS" (CVPR 2019). ``dataset_dicts``: the categories of each sample, each counted once; or
        detectron2's dict of a sample: ``{"annotations": [{"category_id": 0}, ...]}``. ``repeat_thresh``: t, the
        frequency below which a category is repeated; 0 repeats none.
        """
        check_number("repeat_thresh", repeat_thresh, "[0, inf)")
        samples = [_set_of_categories(sample) for sample in dataset_dicts]
        counts: Counter[Hashable] = Counter()
        for categories in samples:
            counts.update(categories)
        factors: dict[Hashable, float] = {}
        for category, count in counts.items():
            ratio = repeat_thresh * len(samples) / count
            if sqrt:
                ratio = math.sqrt(ratio)
            factors[category] = max(1.0, ratio)
        largest = []
        for categories in samples:
            of_sample = [factors[category] for category in categories]
            largest.append(max(of_sample, default=1.0))
        return torch.tensor(largest, dtype=torch.float32, device="cpu")

    @property
    def samples_per_epoch(self) -> int:
        return len(self._whole)

    def state_dict(self, position: int | None = None) -> dict[str, int]:
        state = super().state_dict(position)
        epoch, offset = self.locate(state["position"])
        return {**state, "epoch": epoch, "offset": offset}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        super().load_state_dict(state)
        start = state["position"] - state["offset"]
        self._located = state["epoch"] - 1, start, start

    def epoch_indices(self, epoch: int) -> torch.Tensor:
        generator = new_generator(self.seed, 0, epoch)
        repeats = self._repeats(generator)
        # numpy: torch's repeat starts all its threads
        repeated = np.repeat(np.arange(len(repeats)), repeats.numpy())
        indices = torch.from_numpy(repeated)
        if self._shuffle:
            order = torch.randperm(len(indices), generator=generator, device="cpu")
            indices = indices[order]
        return indices

    def _repeats(self, generator: torch.Generator) -> torch.Tensor:
        size = len(self._whole)
        drawn = torch.rand(size, dtype=torch.float64, generator=generator, device="cpu")
        is_rounded_up = drawn < self._fraction
        return self._whole + is_rounded_up

    def locate(self, position: int) -> tuple[int, int]:
        """(epoch, offset in it) of a sample of the global stream; draws the lengths of unknown epochs."""
        epoch, start, end = self._located
        if position < start:
            epoch, start, end = _BEFORE_ALL
        while end <= position:
            epoch += 1
            start = end
            repeats = self._repeats(new_generator(self.seed, 0, epoch))
            end += int(repeats.sum())
        self._located = epoch, start, end
        return epoch, position - start


def _set_of_categories(sample: Collection[Hashable] | Mapping[str, Any]) -> set[Hashable]:
    if isinstance(sample, Mapping):
        return {entry["category_id"] for entry in sample["annotations"]}
    return {*sample}


def _categories_of(sample: Any) -> Collection[Hashable] | Mapping[str, Any]:
    """The entry "category", or else "label", of a sample before its transform; detectron2's dict as it is."""
    if not isinstance(sample, Mapping):
        sample_keys: list[str] = []
    else:
        sample_keys = [key for key in ("annotations", "category", "label") if key in sample]
    if not sample_keys:
        accepted = "a dict with 'category', 'label' or 'annotations'"
        raise ConfigError(
            f"RepeatFactorTrainingSampler needs categories: {accepted}, got {sample!r:.99}"
        )
    key = sample_keys[0]
    if key == "annotations":
        return sample
    value = sample[key]
    if hasattr(value, "tolist"):
        value = value.tolist()
    return value if isinstance(value, list | tuple | set | frozenset) else [value]
