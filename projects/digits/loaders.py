"""The loaders of the digits, as functions that a config can call."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

from projects.digits.data import load_split
from trainkit.data import (
    DatasetFromList,
    InferenceSampler,
    MapDataset,
    ResumableLoader,
    TrainingSampler,
    build_batch_data_loader,
)


def train_loader(
    split: str,
    transform: Callable[[Any], Any],
    total_batch_size: int,
    num_workers: int = 0,
    seed: int | None = None,
) -> ResumableLoader:
    """Endless and shuffled; ``total_batch_size`` samples per batch over all ranks."""
    samples = load_split(split)
    return build_batch_data_loader(
        MapDataset(DatasetFromList(samples), transform),
        TrainingSampler(len(samples), seed=seed),
        total_batch_size,
        num_workers=num_workers,
        collate_fn=default_collate,
        pin_memory=True,
        seed=seed,
    )


def eval_loader(
    split: str, transform: Callable[[Any], Any], batch_size: int, num_workers: int = 0
) -> ResumableLoader:
    """Each sample once, in order; ``batch_size`` of them per rank."""
    samples = load_split(split)
    return build_batch_data_loader(
        MapDataset(DatasetFromList(samples), transform),
        InferenceSampler(len(samples)),
        None,
        single_gpu_batch_size=batch_size,
        num_workers=num_workers,
        collate_fn=default_collate,
        drop_last=False,
    )
