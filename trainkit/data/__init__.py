"""Datasets by name, samplers and loaders.

The order of a sampler depends on the seed and the position alone. A config can build the loaders.
"""

from trainkit.data.build import (
    SAMPLER_REGISTRY,
    TRANSFORM_REGISTRY,
    build_batch_data_loader,
    build_test_loader,
    build_train_loader,
    build_transform,
)
from trainkit.data.catalog import DatasetCatalog
from trainkit.data.common import DatasetFromList, MapDataset
from trainkit.data.fetch import trivial_batch_collator
from trainkit.data.loader import ResumableLoader
from trainkit.data.protocol import batches_per_epoch, resume_obstacle
from trainkit.data.samplers import InferenceSampler, InfiniteSampler, TrainingSampler
from trainkit.data.workers import worker_init_reset_seed
from trainkit.utils.plugins import lending

__all__ = ["DatasetCatalog", "MapDataset", "DatasetFromList", "SAMPLER_REGISTRY"]
__all__ += ["TRANSFORM_REGISTRY", "build_transform", "build_train_loader", "build_test_loader"]
__all__ += [
    "build_batch_data_loader",
    "ResumableLoader",
    "trivial_batch_collator",
    "worker_init_reset_seed",
]
__all__ += [
    "TrainingSampler",
    "InfiniteSampler",
    "InferenceSampler",
    "resume_obstacle",
    "batches_per_epoch",
]

__getattr__, __dir__ = lending(__name__)
