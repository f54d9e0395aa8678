"""Build the sampler of the training data."""

from collections.abc import Collection, Hashable, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from trainkit.config.config import CfgNode
from trainkit.config.errors import ConfigError, unknown_name
from trainkit.data.samplers.infinite import InfiniteSampler
from trainkit.data.samplers.repeat_factor import RepeatFactorTrainingSampler
from trainkit.data.samplers.training import LimitedSampler, RandomSubsetTrainingSampler, TrainingSampler

_OVERFIT = "DATALOADER.OVERFIT_BATCHES"
_SAMPLERS = ("TrainingSampler", "RandomSubsetTrainingSampler", "RepeatFactorTrainingSampler")


def build_train_sampler(cfg: CfgNode, dataset: Any) -> InfiniteSampler | None:
    """The sampler ``cfg.DATALOADER.SAMPLER_TRAIN`` for a map-style dataset; None for an iterable dataset.

    Raises:
        ConfigError: the sampler is unknown or does not fit the dataset, or a sample lacks categories.
    """
    options, name, seed = cfg.DATALOADER, cfg.DATALOADER.SAMPLER_TRAIN, seed_of(cfg)
    if name not in _SAMPLERS:
        raise unknown_name("DATALOADER.SAMPLER_TRAIN", name, "accepted", _SAMPLERS)
    if isinstance(dataset, IterableDataset):
        if name != "TrainingSampler":
            raise ConfigError(
                f"DATALOADER.SAMPLER_TRAIN is {name!r}, but an iterable dataset has its own order; "
                "leave the default, which it ignores"
            )
        return None
    if name == "TrainingSampler":
        sampler: InfiniteSampler = TrainingSampler(len(dataset), seed=seed)
    elif name == "RandomSubsetTrainingSampler":
        ratio = options.RANDOM_SUBSET_RATIO
        sampler = RandomSubsetTrainingSampler(len(dataset), ratio, seed_shuffle=seed, seed_subset=seed)
    else:
        categories = [_categories(dataset[index]) for index in range(len(dataset))]  # reads every sample once
        factors_of = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency
        factors = factors_of(categories, options.REPEAT_THRESHOLD, options.REPEAT_SQRT)
        sampler = RepeatFactorTrainingSampler(factors, seed=seed)
    key, limit = epoch_limit(cfg)
    size, repeats = limit * cfg.SOLVER.IMS_PER_BATCH, key == _OVERFIT
    is_limited = repeats or 0 < size < sampler.samples_per_epoch
    return LimitedSampler(sampler, size, repeat_first=repeats) if is_limited else sampler


def epoch_limit(cfg: CfgNode) -> tuple[str, int]:
    """The key that limits the epochs, and the largest number of batches of IMS_PER_BATCH samples; 0: no limit."""
    key = _OVERFIT if cfg.DATALOADER.OVERFIT_BATCHES else "SOLVER.MAX_BATCHES_PER_EPOCH"
    limit = cfg.DATALOADER.OVERFIT_BATCHES or cfg.SOLVER.MAX_BATCHES_PER_EPOCH
    return key, limit * cfg.SOLVER.ACCUMULATION_STEPS


def _categories(sample: Any) -> Collection[Hashable] | Mapping[str, Any]:
    """The category or categories of a sample, before its transform: its entry "category", or else "label".

    A sample in detectron2's form is returned as it is.
    """
    if isinstance(sample, Mapping) and "annotations" in sample:
        return sample
    key = next((key for key in ("category", "label") if isinstance(sample, Mapping) and key in sample), None)
    if key is None:
        found = f"the keys {[*sample]}" if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
        raise ConfigError(
            "DATALOADER.SAMPLER_TRAIN 'RepeatFactorTrainingSampler' reads a sample's categories under 'category', "
            f"'label' or 'annotations', but a sample has {found}; use such dicts, or another sampler"
        )
    value = sample[key].tolist() if hasattr(sample[key], "tolist") else sample[key]
    return value if isinstance(value, list | tuple | set | frozenset) else [value]


def seed_of(cfg: CfgNode) -> int | None:
    """The seed of a config; None if it must be drawn."""
    return None if cfg.SEED < 0 else cfg.SEED
