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
                f"subset_ratio {subset_ratio} of {size} samples is {subset_size}; it must be 1 to {size}"
            )
        super().__init__(subset_size, shuffle, seed_shuffle)
        self._dataset_size = size
        self._choose(comm.shared_random_seed() if seed_subset is None else int(seed_subset))

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset: Any) -> dict[str, Any]:
        seed, ratio = seed_of(cfg), cfg.DATALOADER.RANDOM_SUBSET_RATIO
        return {
            "size": len(dataset),
            "subset_ratio": ratio,
            "seed_shuffle": seed,
            "seed_subset": seed,
        }

    def _choose(self, seed: int) -> None:
        # epochs have the key 0, so the subset is independent of all orders
        generator = new_generator(seed, 1)
        chosen = torch.randperm(self._dataset_size, generator=generator, device="cpu")[
            : self.samples_per_epoch
        ]
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
        self._sampler, self._repeat_first = sampler, repeat_first
        self._size = check_period("size", size, minimum=1)

    @property
    def samples_per_epoch(self) -> int:
        return min(self._size, self._sampler.samples_per_epoch)

    def epoch_indices(self, epoch: int) -> torch.Tensor:
        return self._sampler.epoch_indices(0 if self._repeat_first else epoch)[
            : self.samples_per_epoch
        ]

    def state_dict(self, position: int | None = None) -> dict[str, int]:
        return {**self._sampler.state_dict(0), **super().state_dict(position)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._sampler.load_state_dict({**state, "position": 0})
        self.seed = self._sampler.seed
        self.set_position(state["position"])


@SAMPLER_REGISTRY.register()
def limited_sampler(cfg: CfgNode, dataset: Any) -> InfiniteSampler:
    """The sampler of the config, with its limit; DATALOADER.LIMITED is the name that `prepare` has replaced."""
    sampler: InfiniteSampler = SAMPLER_REGISTRY.get(
        cfg.DATALOADER.get("LIMITED", "TrainingSampler")
    )(cfg, dataset)
    repeats = cfg.DATALOADER.OVERFIT_BATCHES > 0
    num_batches = cfg.DATALOADER.OVERFIT_BATCHES or cfg.SOLVER.MAX_BATCHES_PER_EPOCH
    size = num_batches * cfg.SOLVER.ACCUMULATION_STEPS * cfg.SOLVER.IMS_PER_BATCH
    is_limited = repeats or 0 < size < sampler.samples_per_epoch
    return LimitedSampler(sampler, size, repeat_first=repeats) if is_limited else sampler


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
        if not factors.isfinite().all() or (factors < 0).any() or not factors.any():
            raise ValueError(
                f"repeat_factors must be finite, >= 0 and not all 0, got {factors.tolist()!s:.99}"
            )
        self._whole, self._fraction, self._shuffle = factors.floor().long(), factors.frac(), shuffle
        self._located = _BEFORE_ALL

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset: Any) -> dict[str, Any]:
        """Read every sample once. Raises ConfigError if a sample lacks categories."""
        categories = [_categories_of(dataset[index]) for index in range(len(dataset))]
        options = cfg.DATALOADER.REPEAT_THRESHOLD, cfg.DATALOADER.REPEAT_SQRT
        factors = cls.repeat_factors_from_category_frequency(categories, *options)
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
        samples = [
            {entry["category_id"] for entry in sample["annotations"]}
            if isinstance(sample, Mapping)
            else {*sample}
            for sample in dataset_dicts
        ]
        counts = Counter(category for categories in samples for category in categories)
        ratios = {
            category: repeat_thresh * len(samples) / count for category, count in counts.items()
        }
        factors = {
            category: max(1.0, math.sqrt(ratio) if sqrt else ratio)
            for category, ratio in ratios.items()
        }
        largest = [
            max((factors[category] for category in categories), default=1.0)
            for categories in samples
        ]
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
        repeats = self._repeats(generator := new_generator(self.seed, 0, epoch))
        # numpy: torch's repeat starts all its threads
        indices = torch.from_numpy(np.repeat(np.arange(len(repeats)), repeats.numpy()))
        return (
            indices[torch.randperm(len(indices), generator=generator, device="cpu")]
            if self._shuffle
            else indices
        )

    def _repeats(self, generator: torch.Generator) -> torch.Tensor:
        drawn = torch.rand(len(self._whole), dtype=torch.float64, generator=generator, device="cpu")
        return self._whole + (drawn < self._fraction)

    def locate(self, position: int) -> tuple[int, int]:
        """(epoch, offset in it) of a sample of the global stream; draws the lengths of unknown epochs."""
        epoch, start, end = self._located if self._located[1] <= position else _BEFORE_ALL
        while end <= position:
            epoch, start = epoch + 1, end
            end += int(self._repeats(new_generator(self.seed, 0, epoch)).sum())
        self._located = epoch, start, end
        return epoch, position - start


def _categories_of(sample: Any) -> Collection[Hashable] | Mapping[str, Any]:
    """The entry "category", or else "label", of a sample before its transform; detectron2's dict as it is."""
    keys = [
        key
        for key in ("annotations", "category", "label")
        if isinstance(sample, Mapping) and key in sample
    ]
    if not keys:
        accepted = "a dict with 'category', 'label' or 'annotations'"
        raise ConfigError(
            f"RepeatFactorTrainingSampler needs categories: {accepted}, got {sample!r:.99}"
        )
    if keys[0] == "annotations":
        return sample
    value = sample[keys[0]].tolist() if hasattr(sample[keys[0]], "tolist") else sample[keys[0]]
    return value if isinstance(value, list | tuple | set | frozenset) else [value]
