"""Build loaders from datasets and samplers, or from a config."""

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch.utils.data import ChainDataset, ConcatDataset, IterableDataset, Sampler, default_collate

from trainkit.config.config import CfgNode
from trainkit.config.from_config import configurable
from trainkit.data.catalog import DatasetCatalog
from trainkit.data.common import DatasetFromList, MapDataset
from trainkit.data.fetch import trivial_batch_collator
from trainkit.data.loader import LOADER_KEY, ResumableLoader
from trainkit.data.samplers import InferenceSampler, TrainingSampler, new_generator, seed_of

# detectron2 has it here
from trainkit.data.workers import (
    worker_init_reset_seed as worker_init_reset_seed,
)
from trainkit.utils import comm
from trainkit.utils.device import accelerator_runs_ahead, resolve_device, runs_ahead
from trainkit.utils.errors import ConfigError, look_up, not_accepted, unknown_name
from trainkit.utils.registry import Registry

SAMPLER_REGISTRY = Registry("SAMPLER")
"""DATALOADER.SAMPLER_TRAIN -> a class or function ``(cfg, dataset)`` that returns an
`InfiniteSampler`."""

SAMPLER_REGISTRY.register(TrainingSampler)

TRANSFORM_REGISTRY = Registry("TRANSFORM")
"""Name -> a class or function ``(cfg)`` that returns a function sample -> sample. If the function
returns None, another sample is used instead."""

_COLLATE_FNS = {"default": default_collate, "list": trivial_batch_collator}
_Function: TypeAlias = Callable[[Any], Any] | None
_Sampler: TypeAlias = Sampler[int] | None


def build_batch_data_loader(
    dataset: Any,
    sampler: _Sampler,
    total_batch_size: int | None,
    *,
    aspect_ratio_grouping: bool = False,
    num_workers: int = 0,
    collate_fn: _Function = None,
    drop_last: bool = True,
    single_gpu_batch_size: int | None = None,
    prefetch_factor: int = 2,
    persistent_workers: bool = False,
    pin_memory: bool = False,
    seed: int | None = None,
    **kwargs: Any,
) -> ResumableLoader:
    """A loader of this rank's part of every global batch; it is endless if the sampler is.

    Args:
        dataset: an iterable dataset must divide itself between ranks and workers.
        sampler: indices of this rank; None for an iterable dataset.
        total_batch_size: samples per batch over all ranks; None if ``single_gpu_batch_size`` is
            given, those per rank.
        aspect_ratio_grouping: only for calls written for detectron2; True is refused.
        collate_fn: list of samples -> batch; None: ``trivial_batch_collator``.
        drop_last: has no effect on an iterable dataset, where each worker has a last batch. They
            are all given, so that no sample of a pass is lost; they may be short.
        pin_memory: has an effect only with an accelerator that runs ahead of the host.
        seed, kwargs: as for `ResumableLoader`; the seed is also for the workers, with the rank.
    """
    if aspect_ratio_grouping:
        raise ValueError(
            "aspect_ratio_grouping is not accepted; use GroupedBatchSampler or "
            "AspectRatioGroupedDataset"
        )
    batch_size = _batch_size_of_rank(total_batch_size, single_gpu_batch_size)
    inside = indexed_inside(dataset)
    if inside is not None:
        dataset, sampler = inside
    if seed is None:
        seed = torch.initial_seed()
    if "generator" not in kwargs:
        kwargs["generator"] = new_generator(seed, LOADER_KEY, comm.get_data_rank())
    if num_workers > 0:  # DataLoader accepts these two only with workers
        kwargs["prefetch_factor"] = prefetch_factor
        kwargs["persistent_workers"] = persistent_workers
    return ResumableLoader(
        dataset,
        seed=seed,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last and not isinstance(dataset, IterableDataset),
        num_workers=num_workers,
        collate_fn=trivial_batch_collator if collate_fn is None else collate_fn,
        pin_memory=pin_memory and accelerator_runs_ahead(),
        **kwargs,
    )


def indexed_inside(dataset: Any) -> tuple[Any, Any] | None:
    """The map-style dataset and the sampler inside an iterable dataset that only joins them.

    Such a dataset says them in its attribute ``indexed``: with indices its position can be saved.
    None: it is another one.
    """
    inside: tuple[Any, Any] | None = getattr(dataset, "indexed", None)
    return inside


def _batch_size_of_rank(total: int | None, single: int | None) -> int:
    """The samples per batch of one rank, from those of all ranks or of a single one."""
    if (total is None) == (single is None):
        raise ValueError(f"give total_batch_size or single_gpu_batch_size: {total}, {single}")
    num_ranks = comm.get_data_world_size()
    if total is None:
        assert single is not None
        total = single * num_ranks
    if total < 1 or total % num_ranks != 0:
        # a ConfigError: a command line with another number of processes can cause it
        raise ConfigError(
            "total_batch_size (SOLVER.IMS_PER_BATCH in a config) must be a positive multiple of "
            f"the world size {num_ranks}, got {total}"
        )
    return total // num_ranks


def _loader_arguments(cfg: CfgNode, mapper: _Function, is_train: bool) -> dict[str, Any]:
    if cfg.DATALOADER.COLLATE not in _COLLATE_FNS:
        raise unknown_name("DATALOADER.COLLATE", cfg.DATALOADER.COLLATE, "accepted", _COLLATE_FNS)
    if mapper is None:
        mapper = build_transform(cfg, is_train)
    return {
        "mapper": mapper,
        "persistent_workers": is_train and cfg.DATALOADER.PERSISTENT_WORKERS,
        "num_workers": cfg.DATALOADER.NUM_WORKERS,
        "collate_fn": _COLLATE_FNS[cfg.DATALOADER.COLLATE],
        "prefetch_factor": cfg.DATALOADER.PREFETCH_FACTOR,
        "timeout": cfg.DATALOADER.TIMEOUT,
        "pin_memory": runs_ahead(resolve_device(cfg.MODEL.DEVICE)),
        "seed": seed_of(cfg),
    }


def _train_arguments(
    cfg: CfgNode, dataset: Any = None, *, mapper: _Function = None, sampler: _Sampler = None
) -> dict[str, Any]:
    # detectron2 has the mapper at this position
    is_mapper = callable(dataset) and not hasattr(dataset, "__getitem__")
    if is_mapper:
        mapper = dataset
        dataset = None
    if dataset is None:
        dataset = _load_train_dataset(cfg)
    key = "DATALOADER.SAMPLER_TRAIN"
    name = cfg.DATALOADER.SAMPLER_TRAIN
    if isinstance(dataset, IterableDataset):
        if cfg.DATALOADER.is_set("SAMPLER_TRAIN"):
            raise not_accepted(
                key,
                name,
                "that neither this key nor one that chooses a sampler is set: a stream has its own "
                "order",
            )
    elif sampler is None:
        make_sampler = look_up(SAMPLER_REGISTRY, name, key, ("cfg", "dataset"))
        sampler = make_sampler(cfg, dataset)
    return {
        "dataset": dataset,
        "sampler": sampler,
        "total_batch_size": cfg.SOLVER.IMS_PER_BATCH,
        **_loader_arguments(cfg, mapper, is_train=True),
    }


def _load_train_dataset(cfg: CfgNode) -> Any:
    """The datasets of DATASETS.TRAIN as one."""
    parts = [_load_dataset(name, "DATASETS.TRAIN") for name in cfg.DATASETS.TRAIN]
    if not parts:
        raise ConfigError("DATASETS.TRAIN is empty; name at least one registered dataset")
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], IterableDataset):
        return ChainDataset(parts)
    return ConcatDataset(parts)


@configurable(from_config=_train_arguments)
def build_train_loader(
    dataset: Any,
    *,
    mapper: _Function = None,
    sampler: _Sampler = None,
    total_batch_size: int,
    **kwargs: Any,
) -> ResumableLoader:
    """The endless loader of a dataset.

    Or of a config, with ``(cfg)``, ``(cfg, dataset)`` or ``(cfg, mapper)``.

    Args:
        dataset: a list of samples, map-style, or iterable.
        mapper: applied to each sample before collating.
        sampler: None: a `TrainingSampler`.
        kwargs: as for `build_batch_data_loader`, but ``collate_fn`` is torch's
            ``default_collate``.
    """
    dataset = _mapped(dataset, mapper)
    if sampler is None and not isinstance(dataset, IterableDataset):
        sampler = TrainingSampler(len(dataset), seed=kwargs.get("seed"))
    kwargs.setdefault("collate_fn", default_collate)
    return build_batch_data_loader(dataset, sampler, total_batch_size, **kwargs)


def _test_arguments(
    cfg: CfgNode, dataset_name: str = "", mapper: _Function = None, *, dataset: Any = None
) -> dict[str, Any]:
    if dataset is None:
        if not dataset_name:
            raise TypeError("build_test_loader(cfg, ...) needs dataset_name, or dataset=")
        dataset = _load_dataset(dataset_name, "DATASETS")
    return {
        "dataset": dataset,
        "batch_size": cfg.TEST.IMS_PER_BATCH,
        **_loader_arguments(cfg, mapper, is_train=False),
    }


@configurable(from_config=_test_arguments)
def build_test_loader(
    dataset: Any,
    *,
    mapper: _Function = None,
    sampler: _Sampler = None,
    batch_size: int = 1,
    **kwargs: Any,
) -> ResumableLoader:
    """The loader of a dataset: all ranks together get each sample once, in order.

    Or of a config, with ``(cfg, dataset_name)`` or ``(cfg, dataset=dataset)``.

    Args:
        dataset, mapper, kwargs: as for `build_train_loader`.
        sampler: None: an `InferenceSampler`.
        batch_size: samples per batch of this rank.
    """
    dataset = _mapped(dataset, mapper)
    if sampler is None and not isinstance(dataset, IterableDataset):
        sampler = InferenceSampler(len(dataset))
    options: dict[str, Any] = {
        "single_gpu_batch_size": batch_size,
        "drop_last": False,
        "collate_fn": default_collate,
    }
    options.update(kwargs)
    return build_batch_data_loader(dataset, sampler, None, **options)


def _load_dataset(name: str, key: str) -> Any:
    if name not in DatasetCatalog:
        raise ConfigError(f"{key}: {DatasetCatalog.explain_unknown(name)}")
    return _mapped(DatasetCatalog.get(name))


def _mapped(dataset: Any, mapper: _Function = None) -> Any:
    if isinstance(dataset, list | tuple):
        dataset = DatasetFromList(dataset)
    if mapper is None:
        return dataset
    return MapDataset(dataset, mapper)


def build_transform(cfg: CfgNode, is_train: bool) -> _Function:
    """Build ``cfg.INPUT.TRAIN_TRANSFORM`` or ``cfg.INPUT.TEST_TRANSFORM``.

    None if the name is empty.
    """
    key = "TRAIN_TRANSFORM" if is_train else "TEST_TRANSFORM"
    name = cfg.INPUT[key]
    if not name:
        return None
    make = look_up(TRANSFORM_REGISTRY, name, f"INPUT.{key}", ("cfg",))
    return cast(_Function, make(cfg))
