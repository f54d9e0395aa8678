"""Build loaders from datasets and samplers, or from a config."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch.utils.data import ChainDataset, ConcatDataset, IterableDataset, Sampler, default_collate

from trainkit.config.checks import check_is_ours
from trainkit.config.config import CfgNode
from trainkit.config.errors import ConfigError, unknown_name
from trainkit.config.from_config import configurable
from trainkit.data.catalog import DatasetCatalog
from trainkit.data.common import DatasetFromList, MapDataset, ToIterableDataset, add_note
from trainkit.data.loader import LOADER_KEY, ResumableLoader, trivial_batch_collator
from trainkit.data.samplers.inference import InferenceSampler
from trainkit.data.samplers.infinite import InfiniteSampler, check_seed, new_generator, seed_of
from trainkit.data.samplers.training import TrainingSampler
from trainkit.data.train_sampler import build_train_sampler, epoch_limit
from trainkit.data.transforms import build_transform
from trainkit.data.workers import worker_init_reset_seed as worker_init_reset_seed  # detectron2 has it here
from trainkit.utils import comm
from trainkit.utils.device import accelerator_runs_ahead, resolve_device, runs_ahead
from trainkit.utils.periods import whole_or_rounded


def build_batch_data_loader(
    dataset: Any,
    sampler: Sampler[int] | None,
    total_batch_size: int | None,
    *,
    aspect_ratio_grouping: bool = False,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = True,
    single_gpu_batch_size: int | None = None,
    prefetch_factor: int = 2,
    persistent_workers: bool = False,
    pin_memory: bool = False,
    seed: int | None = None,
    **kwargs: Any,
) -> ResumableLoader:
    """A loader of this rank's part of every global batch.

    With a map-style dataset, batches do not depend on the number of workers. With an endless sampler the loader is
    endless, and its length raises TypeError. Iterating does not use the global random state.

    Args:
        dataset: an iterable dataset must divide itself between ranks and workers.
        sampler: indices of this rank; None for an iterable dataset.
        total_batch_size: samples per batch over all ranks; None if ``single_gpu_batch_size`` is given.
        aspect_ratio_grouping: only for calls written for detectron2; True is refused.
        collate_fn: list of samples -> batch; None: ``trivial_batch_collator``.
        single_gpu_batch_size: samples per batch of this rank, instead of ``total_batch_size``.
        pin_memory: has an effect only with an accelerator that runs ahead of the host.
        seed: for the workers (with the rank), and for augmentation if the sampler has no seed; None:
            ``torch.initial_seed()``.
        kwargs: further arguments of `ResumableLoader`, also those of ``DataLoader``.

    Raises:
        ValueError: not exactly one batch size is given; it is less than 1, or no multiple of the world size; the seed
            is negative; the sampler does not fit the kind of dataset.
    """
    if aspect_ratio_grouping:
        raise ValueError(
            "aspect_ratio_grouping: such a loader cannot be resumed; give the groups to GroupedBatchSampler, or wrap a "
            "loader of single samples in AspectRatioGroupedDataset"
        )
    is_iterable = isinstance(dataset, IterableDataset)
    if is_iterable != (sampler is None):
        raise ValueError(
            f"an iterable dataset takes no sampler and a map-style one needs one, "
            f"got {type(dataset).__name__} with sampler {type(sampler).__name__}"
        )
    generator_seed = torch.initial_seed() if seed is None else check_seed(seed)
    has_workers = num_workers > 0
    batch_size = _batch_size_per_rank(total_batch_size, single_gpu_batch_size)
    batches: dict[str, Any] = {"batch_size": batch_size, "sampler": sampler, "drop_last": drop_last}
    kwargs.setdefault("generator", new_generator(generator_seed, LOADER_KEY, comm.get_data_rank()))
    return ResumableLoader(
        dataset,
        seed=generator_seed,
        **batches,
        num_workers=num_workers,
        collate_fn=trivial_batch_collator if collate_fn is None else collate_fn,
        prefetch_factor=prefetch_factor if has_workers else None,  # DataLoader accepts these two only with workers
        persistent_workers=persistent_workers and has_workers,
        pin_memory=pin_memory and accelerator_runs_ahead(),
        **kwargs,
    )


def _batch_size_per_rank(total_batch_size: int | None, single_gpu_batch_size: int | None) -> int:
    if (total_batch_size is None) == (single_gpu_batch_size is None):
        raise ValueError(
            "give either total_batch_size (over all ranks) or single_gpu_batch_size, "
            f"got {total_batch_size} and {single_gpu_batch_size}"
        )
    if single_gpu_batch_size is not None:
        if single_gpu_batch_size < 1:
            raise ValueError(
                "single_gpu_batch_size (TEST.IMS_PER_BATCH in a config) must be >= 1 sample, "
                f"got {single_gpu_batch_size}"
            )
        return single_gpu_batch_size
    total, num_ranks = total_batch_size or 0, comm.get_data_world_size()
    if total < 1 or total % num_ranks:
        raise ConfigError(  # a ConfigError, since a command line with another number of processes can cause it
            f"total_batch_size (SOLVER.IMS_PER_BATCH in a config) must be a positive multiple of the "
            f"world size {num_ranks}, got {total}"
        )
    return total // num_ranks


def first_batches(loader: Iterable[Any], num: int) -> Iterable[Any]:
    """At most ``num`` batches of a test loader; a loader may do this itself, in a method of this name."""
    own: Any = getattr(loader, "first_batches", None)
    return itertools.islice(loader, num) if own is None else own(num)


def iters_per_epoch(loader: Iterable[Any]) -> int | None:
    """Batches per pass over the data; None for a stream without a length. Starts no worker.

    For an endless sampler of this package: ``samples_per_epoch`` over the global batch size, rounded.
    """
    if hasattr(loader, "batches_per_epoch"):
        return loader.batches_per_epoch
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # an endless sampler, a stream
        pass
    dataset = getattr(loader, "dataset", None)
    batches: Any = getattr(loader, "batch_sampler", None)
    sampler = getattr(dataset if isinstance(dataset, ToIterableDataset) else batches, "sampler", None)
    if not isinstance(sampler, InfiniteSampler) or not getattr(batches, "batch_size", None):
        return None
    return whole_or_rounded(Fraction(sampler.samples_per_epoch, batches.batch_size * sampler.world_size))


def check_epoch_limit(cfg: CfgNode, loader: Iterable[Any]) -> None:
    """Raises ConfigError if the config limits epochs, and a training loader has epochs of larger or unknown length."""
    key, limit = epoch_limit(cfg)
    batches = iters_per_epoch(loader) if limit else 0
    if batches is None or batches > limit:
        raise ConfigError(
            f"{key} allows {limit} batches of SOLVER.IMS_PER_BATCH samples per epoch, but an epoch of the training "
            f"loader ({type(loader).__name__}) has {batches or 'no known number'}; build it with "
            "trainkit.data.build_train_loader(cfg), which keeps to the limit, or leave the key out"
        )


def _train_arguments(
    cfg: CfgNode,
    dataset: Any = None,
    *,
    mapper: Callable[[Any], Any] | None = None,
    sampler: Sampler[int] | None = None,
) -> dict[str, Any]:
    check_is_ours(cfg)
    if callable(dataset) and not hasattr(dataset, "__getitem__"):  # detectron2 has the mapper at this position
        dataset, mapper = None, dataset
    if dataset is None:
        if not cfg.DATASETS.TRAIN:
            known = ", ".join(sorted(DatasetCatalog.list())) or "none"
            raise ConfigError(f"DATASETS.TRAIN is empty; name at least one registered dataset (registered: {known})")
        dataset = _concatenate([_load_dataset(name, "DATASETS.TRAIN") for name in cfg.DATASETS.TRAIN])
    else:
        dataset = _as_dataset(dataset, "dataset")
    return {
        "dataset": dataset,
        "mapper": build_transform(cfg, is_train=True) if mapper is None else mapper,
        "sampler": build_train_sampler(cfg, dataset) if sampler is None else sampler,
        "total_batch_size": cfg.SOLVER.IMS_PER_BATCH,
        "persistent_workers": cfg.DATALOADER.PERSISTENT_WORKERS,
        **_loader_arguments(cfg),
    }


@configurable(from_config=_train_arguments)
def build_train_loader(
    dataset: Any,
    *,
    mapper: Callable[[Any], Any] | None = None,
    sampler: Sampler[int] | None = None,
    total_batch_size: int,
    **kwargs: Any,
) -> ResumableLoader:
    """The endless loader of a dataset; or of a config, with ``(cfg)``, ``(cfg, dataset)`` or ``(cfg, mapper)``.

    With a config, arguments that the call does not give come from it: the dataset by ``DATASETS.TRAIN``, ``mapper`` by
    ``INPUT.TRAIN_TRANSFORM``, ``sampler`` by ``DATALOADER.SAMPLER_TRAIN``, the batch size by ``SOLVER.IMS_PER_BATCH``.

    Args:
        dataset: a list of samples, map-style, or iterable. An iterable dataset has its own order, length, and division
            between ranks and workers.
        mapper: applied to each sample before collating.
        sampler: None: a `TrainingSampler`.
        total_batch_size, kwargs: as for `build_batch_data_loader`.

    Raises:
        ConfigError: a name is unknown; a dataset is empty, or of a kind that the other datasets or the sampler do not
            allow; the batch size is not a multiple of the world size.
    """
    dataset = _as_dataset(dataset, "dataset")
    if sampler is None and not isinstance(dataset, IterableDataset):
        sampler = TrainingSampler(len(dataset), seed=kwargs.get("seed"))
    return build_batch_data_loader(_mapped(dataset, mapper), sampler, total_batch_size, **kwargs)


def _test_arguments(cfg: CfgNode, dataset_name: str, mapper: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    check_is_ours(cfg)
    return {
        "dataset": _load_dataset(dataset_name, "DATASETS"),
        "mapper": build_transform(cfg, is_train=False) if mapper is None else mapper,
        "batch_size": cfg.TEST.IMS_PER_BATCH,
        "persistent_workers": cfg.TEST.PERSISTENT_WORKERS and bool(cfg.TEST.EVAL_PERIOD),
        **_loader_arguments(cfg),
    }


@configurable(from_config=_test_arguments)
def build_test_loader(
    dataset: Any,
    *,
    mapper: Callable[[Any], Any] | None = None,
    sampler: Sampler[int] | None = None,
    batch_size: int = 1,
    **kwargs: Any,
) -> ResumableLoader:
    """The loader of a dataset: all ranks together get each sample once, in order; or of a config, with ``(cfg,
    dataset_name)``.

    With a config, arguments that the call does not give come from it: ``mapper`` by ``INPUT.TEST_TRANSFORM``, the batch
    size by ``TEST.IMS_PER_BATCH``.

    Args:
        dataset, mapper, kwargs: as for `build_train_loader`.
        sampler: None: an `InferenceSampler`.
        batch_size: samples per batch of this rank.

    Raises:
        ConfigError: a name is unknown, or the dataset is empty.
    """
    dataset = _as_dataset(dataset, "dataset")
    if sampler is None and not isinstance(dataset, IterableDataset):
        sampler = InferenceSampler(len(dataset))
    options = {"single_gpu_batch_size": batch_size, "drop_last": False, **kwargs}
    return build_batch_data_loader(_mapped(dataset, mapper), sampler, None, **options)


def _mapped(dataset: Any, mapper: Callable[[Any], Any] | None) -> Any:
    return dataset if mapper is None else MapDataset(dataset, mapper)


def _loader_arguments(cfg: CfgNode) -> dict[str, Any]:
    collate_fns = {"default": default_collate, "list": trivial_batch_collator}
    if cfg.DATALOADER.COLLATE not in collate_fns:
        raise unknown_name("DATALOADER.COLLATE", cfg.DATALOADER.COLLATE, "accepted", collate_fns)
    return {
        "num_workers": cfg.DATALOADER.NUM_WORKERS,
        "collate_fn": collate_fns[cfg.DATALOADER.COLLATE],
        "prefetch_factor": cfg.DATALOADER.PREFETCH_FACTOR,
        "timeout": cfg.DATALOADER.TIMEOUT,
        "pin_memory": runs_ahead(resolve_device(cfg.MODEL.DEVICE)),
        "seed": seed_of(cfg),
    }


def _load_dataset(name: str, key: str) -> Any:
    if name not in DatasetCatalog:
        raise ConfigError(f"{key}: {DatasetCatalog.explain_unknown(name)}")
    try:
        dataset = DatasetCatalog.get(name)
    except Exception as error:
        add_note(error, f"while making the dataset {name!r} ({key})")
        raise
    dataset = _as_dataset(dataset, f"{key}: {name!r}")
    if type(dataset) is DatasetFromList:
        dataset.name = dataset.name or name
    return dataset


def _as_dataset(dataset: Any, origin: str) -> Any:
    if isinstance(dataset, IterableDataset):
        return dataset
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or isinstance(dataset, Mapping | str):
        raise ConfigError(
            f"{origin} is a {type(dataset).__name__}; "
            "a dataset is a list of samples, or has __len__ and __getitem__, or is an IterableDataset"
        )
    if len(dataset) == 0:
        raise ConfigError(f"{origin} has no samples; a dataset must have at least one")
    return DatasetFromList(dataset) if isinstance(dataset, list | tuple) else dataset


def _concatenate(datasets: list[Any]) -> Any:
    if len(datasets) == 1:
        return datasets[0]
    num_iterable = sum(isinstance(dataset, IterableDataset) for dataset in datasets)
    if 0 < num_iterable < len(datasets):
        raise ConfigError(
            f"DATASETS.TRAIN names {num_iterable} iterable datasets among {len(datasets)}; "
            "only datasets of one kind can be concatenated"
        )
    return ChainDataset(datasets) if num_iterable else ConcatDataset(datasets)
