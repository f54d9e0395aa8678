"""Build the sampler of the training data."""

from typing import Any

from torch.utils.data import IterableDataset

from trainkit.config.config import CfgNode
from trainkit.config.errors import ConfigError, look_up
from trainkit.data.samplers.infinite import InfiniteSampler
from trainkit.data.samplers.training import LimitedSampler, TrainingSampler
from trainkit.utils.registry import Registry

SAMPLER_REGISTRY = Registry("SAMPLER")
"""DATALOADER.SAMPLER_TRAIN -> a class or function ``(cfg, dataset)`` that returns an `InfiniteSampler`."""

SAMPLER_REGISTRY.register(TrainingSampler)

_OVERFIT = "DATALOADER.OVERFIT_BATCHES"


def build_train_sampler(cfg: CfgNode, dataset: Any) -> InfiniteSampler | None:
    """The sampler ``cfg.DATALOADER.SAMPLER_TRAIN`` for a map-style dataset; None for an iterable dataset.

    Raises:
        ConfigError: the sampler is unknown or does not fit the dataset.
    """
    name = cfg.DATALOADER.SAMPLER_TRAIN
    build = look_up(SAMPLER_REGISTRY, name, "DATALOADER.SAMPLER_TRAIN")
    if isinstance(dataset, IterableDataset):
        if name != "TrainingSampler":
            raise ConfigError(
                f"DATALOADER.SAMPLER_TRAIN is {name!r}, but an iterable dataset has its own order; "
                "leave the default, which it ignores"
            )
        return None
    sampler: InfiniteSampler = build(cfg, dataset)
    key, limit = epoch_limit(cfg)
    size, repeats = limit * cfg.SOLVER.IMS_PER_BATCH, key == _OVERFIT
    is_limited = repeats or 0 < size < sampler.samples_per_epoch
    return LimitedSampler(sampler, size, repeat_first=repeats) if is_limited else sampler


def epoch_limit(cfg: CfgNode) -> tuple[str, int]:
    """The key that limits the epochs, and the largest number of batches of IMS_PER_BATCH samples; 0: no limit."""
    key = _OVERFIT if cfg.DATALOADER.OVERFIT_BATCHES else "SOLVER.MAX_BATCHES_PER_EPOCH"
    limit = cfg.DATALOADER.OVERFIT_BATCHES or cfg.SOLVER.MAX_BATCHES_PER_EPOCH
    return key, limit * cfg.SOLVER.ACCUMULATION_STEPS
