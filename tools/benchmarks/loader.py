"""The time of a batch, compared with a batch of torch's own loader."""

import statistics
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks import job
from benchmarks.measure import Row, alternate, compare
from trainkit.data.build import build_batch_data_loader
from trainkit.data.samplers import TrainingSampler

BATCH_SIZE = 32


class Trivial(Dataset[tuple[Tensor, int]]):
    """Samples that take no time to make."""

    def __init__(self) -> None:
        self._inputs = torch.randn(10_000, 16)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._inputs[index], index


class Crops(Dataset[tuple[Tensor, int]]):
    """Random crops of pictures, flipped at random."""

    def __init__(self) -> None:
        self._pictures = torch.randint(0, 256, (200, 3, 72, 72), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        top, left, flip = torch.randint(0, 9, (3,)).tolist()
        crop = self._pictures[index, :, top : top + 64, left : left + 64].float() / 255
        return crop.flip(2) if flip > 4 else crop, index


def loader(
    rounds: int = 21, *, scratch: Path, batches: int = 100, workers: Iterable[int] = (0, 2)
) -> list[Row]:
    """Seconds per batch, after both loaders have started; of samples that take no time, what one of them costs more."""
    rows = []
    for num_workers in workers:
        for samples, dataset, goals in (
            ("trivial samples", Trivial(), None),
            ("crops", Crops(), (1.3, 1.1)),
        ):
            with job.one_thread(), job.logging_to(scratch):
                iterators = {
                    label: iter(make(dataset, num_workers)) for label, make in MAKERS.items()
                }
                runs = {
                    label: partial(_draw, iterator, batches)
                    for label, iterator in iterators.items()
                }
                found = alternate(runs, rounds)
                del iterators, runs  # this ends the workers
            name, (ours, theirs) = f"loader, {samples}, {num_workers} workers", MAKERS
            if goals is None:
                differences = [a - b for a, b in zip(found[ours], found[theirs], strict=True)]
                microseconds = statistics.median(differences) / BATCH_SIZE * 1e6
                sides = {side: statistics.median(found[side]) for side in MAKERS}
                rows.append(
                    Row(
                        f"{name}: per sample over DataLoader", microseconds, 12.0, "us", sides=sides
                    )
                )
            else:
                rows.append(compare(name, found, ours, theirs, goals[num_workers > 0]))
    return rows


def _ours(dataset: Dataset[Any], num_workers: int) -> Iterable[Any]:
    sampler = TrainingSampler(len(dataset), seed=0)  # type: ignore[arg-type]
    return build_batch_data_loader(
        dataset, sampler, BATCH_SIZE, num_workers=num_workers, collate_fn=default_collate, seed=0
    )


def _theirs(dataset: Dataset[Any], num_workers: int) -> Iterable[Any]:
    sampler = TrainingSampler(len(dataset), seed=0)  # type: ignore[arg-type]
    return DataLoader(dataset, BATCH_SIZE, sampler=sampler, num_workers=num_workers)


MAKERS = {"trainkit": _ours, "DataLoader": _theirs}


def _draw(batches: Iterator[Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    return (time.perf_counter() - start) / count
