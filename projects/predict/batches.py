"""Predictions for all samples of a dataset or of files, batch by batch."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import Subset, default_collate
from trainkit.projects.evaluators.samples import SampleCounter
from trainkit.projects.predict.predictor import DefaultPredictor
from trainkit.projects.predict.report import told_of_batch, told_of_sample
from trainkit.projects.predict.samples import first_line

from trainkit.config import CfgNode, ConfigError
from trainkit.data import DatasetCatalog, build_test_loader
from trainkit.data.build import build_transform
from trainkit.engine import DefaultTrainer


def predict_dataset(
    predictor: DefaultPredictor, trainer: type[DefaultTrainer], name: str, num: int | None
) -> Iterator[tuple[dict[str, Any], Any]]:
    """The first ``num`` samples of a dataset, or all, in order.

    The loader is that of an evaluation, with DATALOADER.NUM_WORKERS workers, which also transform
    the samples. A trainer with its own ``build_test_loader`` gives the batches, which must then
    hold the names of samples.

    Returns:
        (names and label of a sample, its prediction)

    Raises:
        ConfigError: no dataset has this name.
    """
    batches: Iterable[tuple[list[dict[str, Any]], Any]]
    if not trainer.is_default("build_test_loader"):
        batches = _batches_of_trainer(predictor, trainer, name)
    elif name not in DatasetCatalog:
        raise ConfigError(f"--dataset: {DatasetCatalog.explain_unknown(name)}")
    else:
        dataset = DatasetCatalog.get(name)
        if not hasattr(dataset, "__getitem__"):
            yield from predict_samples(predictor, itertools.islice(dataset, num))
            return
        batches = _loader_of(predictor.cfg, dataset, num)
    yield from itertools.islice(_predict_batches(predictor, batches), num)


def _predict_batches(
    predictor: DefaultPredictor, batches: Iterable[tuple[list[dict[str, Any]], Any]]
) -> Iterator[tuple[dict[str, Any], Any]]:
    for told, batch in batches:
        yield from zip(told, predictor.predict_batch(batch, len(told)), strict=True)


def _batches_of_trainer(
    predictor: DefaultPredictor, trainer: type[DefaultTrainer], name: str
) -> Iterator[tuple[list[dict[str, Any]], Any]]:
    loader = trainer.build_test_loader(predictor.cfg, name)
    count = SampleCounter(predictor.model, loader)
    for batch in loader:
        yield told_of_batch(batch, count(batch)), batch


def _loader_of(
    cfg: CfgNode, dataset: Any, num: int | None
) -> Iterable[tuple[list[dict[str, Any]], Any]]:
    """Batches of a dataset, each with what is told of its samples: a transform may drop that."""
    chosen = Subset(dataset, range(len(dataset))[:num])
    num_batches = math.ceil(len(chosen) / cfg.TEST.IMS_PER_BATCH)
    collate = default_collate if cfg.DATALOADER.COLLATE == "default" else list
    return build_test_loader(
        chosen,
        mapper=partial(_transformed, build_transform(cfg, is_train=False)),
        batch_size=cfg.TEST.IMS_PER_BATCH,
        # a worker starts too slowly for one batch
        num_workers=min(cfg.DATALOADER.NUM_WORKERS, num_batches - 1),
        collate_fn=partial(_collated, collate),
        prefetch_factor=cfg.DATALOADER.PREFETCH_FACTOR,
        timeout=cfg.DATALOADER.TIMEOUT,
    )


def _transformed(transform: Callable[[Any], Any] | None, sample: Any) -> tuple[Any, Any]:
    told = told_of_sample(sample)
    if transform is not None:
        sample = transform(sample)
    return told, sample


def _collated(
    collate: Callable[[list[Any]], Any], samples: list[tuple[dict[str, Any], Any]]
) -> tuple[list[dict[str, Any]], Any]:
    told = [told for told, _ in samples]
    return told, collate([sample for _, sample in samples])


def predict_samples(
    predictor: DefaultPredictor, samples: Iterable[Any], origin: str = ""
) -> Iterator[tuple[dict[str, Any], Any]]:
    """(names and label of a sample, its prediction), in batches of TEST.IMS_PER_BATCH.

    Args:
        origin: named in the error if a batch cannot be predicted; "": the error is not the user's
            mistake.

    Raises:
        ConfigError: a batch cannot be predicted.
    """
    iterator = iter(samples)
    num_done = 0
    while batch := list(itertools.islice(iterator, predictor.cfg.TEST.IMS_PER_BATCH)):
        try:
            outputs = predictor(batch)
        except Exception as error:  # a transform or a model may raise anything
            if not origin:
                raise
            last = num_done + len(batch) - 1
            which = f"samples {num_done} to {last}" if last > num_done else f"sample {last}"
            raise ConfigError(
                f"{origin}: {which} cannot be predicted: {first_line(error)}. A sample has to look "
                "like one of the test dataset before its transform, and samples of a batch are "
                "stacked; if their sizes differ, add --opts TEST.IMS_PER_BATCH 1"
            ) from error
        num_done += len(batch)
        for sample, output in zip(batch, outputs, strict=True):
            yield told_of_sample(sample), output
