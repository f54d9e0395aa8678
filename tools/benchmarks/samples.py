"""A sample of 20 us whose module uses `random`, beside torch's DataLoader.

So that a sample does not depend on the number of workers, all three generators (Python, NumPy,
torch) are seeded before each one. By hand this is done in `__getitem__`. Batches have 32 samples;
times are per sample.
"""

import random
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks import job
from benchmarks.measure import Comparison, compare, one_thread
from trainkit.data.build import build_batch_data_loader
from trainkit.data.samplers import TrainingSampler

ROUNDS = 21
BATCH_SIZE = 32


class Samples(Dataset[tuple[Tensor, int]]):
    """Random crops of small pictures, of about 20 us each."""

    def __init__(self) -> None:
        self._pictures = torch.rand(1000, 12, 12)

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        top = random.randrange(4)
        left = random.randrange(4)
        crop = self._pictures[index, top : top + 8, left : left + 8]
        if random.random() < 0.5:
            crop = crop.flip(1)
        return crop.mul(2).sub(1), index


class SeededByHand(Samples):
    """Seeds all three generators for each sample."""

    seed = 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        number = hash((self.seed, index)) & 0xFFFFFFFF
        random.seed(number)
        np.random.seed(number)
        torch.default_generator.manual_seed(number)  # torch.manual_seed takes 100 us
        return super().__getitem__(index)


def measure(rounds: int, scratch: Path, quick: bool) -> list[Comparison]:
    batches = 2 if quick else 100
    comparisons = []
    with one_thread(), job.logging_to(scratch):
        for num_workers in (0, 2):
            twin = iter(torchs_loader(SeededByHand(), num_workers))
            unseeded = iter(torchs_loader(Samples(), num_workers))
            ours = iter(trainkits_loader(Samples(), num_workers))
            others = {
                "DataLoader, nothing seeded": partial(_draw, unseeded, batches),
                "trainkit": partial(_draw, ours, batches),
            }
            run_twin = partial(_draw, twin, batches)
            work = f"a sample, {num_workers} workers"
            comparisons.append(compare(work, SeededByHand, run_twin, others, rounds))
            del twin, unseeded, ours, others, run_twin  # this ends the workers
    return comparisons


def torchs_loader(dataset: Samples, num_workers: int) -> Iterable[Any]:
    sampler = TrainingSampler(len(dataset), seed=0)
    return DataLoader(dataset, BATCH_SIZE, sampler=sampler, num_workers=num_workers)


def trainkits_loader(dataset: Samples, num_workers: int) -> Iterable[Any]:
    sampler = TrainingSampler(len(dataset), seed=0)
    return build_batch_data_loader(
        dataset, sampler, BATCH_SIZE, num_workers=num_workers, collate_fn=default_collate, seed=0
    )


def _draw(batches: Iterator[Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    return (time.perf_counter() - start) / (count * BATCH_SIZE)
