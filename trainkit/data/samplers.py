"""Samplers choose the samples of a rank and their order."""

import logging
from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from trainkit.config.from_config import configurable
from trainkit.utils import comm
from trainkit.utils.periods import check_number, check_period, is_whole
from trainkit.utils.plugins import lending

__all__ = ["InferenceSampler", "InfiniteSampler", "TrainingSampler"]

logger = logging.getLogger(__name__)

# number of indices converted to Python ints at a time: a list of 1e8 would take gigabytes
_BLOCK = 1 << 16

__getattr__, __dir__ = lending(__name__)


class InfiniteSampler(Sampler[int]):
    """Epochs 0, 1, 2, ... of a dataset without end; each ``iter()`` starts at position ``start``.

    Sample ``p`` of this stream goes to rank ``p % world_size``, so any number of ranks draws the
    same global batches. A subclass has ``samples_per_epoch``, over all ranks, and
    ``epoch_indices(epoch)``: int64 ``[N]``, which depends on ``(seed, epoch)`` alone.

    Args:
        seed: the same on all ranks, >= 0. None: all ranks share a random seed, so every rank must
            create the sampler.
    """

    samples_per_epoch: Any

    def __init__(self, seed: int | None) -> None:
        if seed is None:
            self.seed = comm.shared_random_seed()
        else:
            self.seed = check_number("seed", int(seed), "[0, inf)")
        # stored, since a spawned loader worker has no process group
        self.rank = comm.get_data_rank()
        self.world_size = comm.get_data_world_size()
        self.start = 0

    def epoch_indices(self, epoch: int) -> torch.Tensor:
        raise NotImplementedError

    def set_position(self, num_samples: int) -> None:
        """Start the next ``iter()`` after the first ``num_samples`` of the stream of all ranks."""
        self.start = num_samples

    def state_dict(self, position: int | None = None) -> dict[str, int]:
        """The seed, and ``position`` in samples of the stream; default is ``start``."""
        if position is None:
            position = self.start
        return {"seed": self.seed, "position": position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        check_period("seed", state["seed"])
        check_period("position", state["position"])
        if state["seed"] != self.seed:
            logger.info(
                "The data continues in the order of the checkpoint's seed %d, not of %d",
                state["seed"],
                self.seed,
            )
        self.seed = state["seed"]
        self.set_position(state["position"])

    def locate(self, position: int) -> tuple[int, int]:
        """(epoch, offset in it) of a sample of the stream."""
        return divmod(position, self.samples_per_epoch)

    def _infinite_indices(self) -> Iterator[int]:
        """The stream of all ranks from ``start`` on; a subclass may override it."""
        first_epoch, offset = self.locate(self.start)
        for epoch in count(first_epoch):
            indices = self.epoch_indices(epoch)
            if epoch == first_epoch:
                indices = indices[offset:]
            for block in indices.split(_BLOCK):
                yield from block.tolist()

    def __iter__(self) -> Iterator[int]:
        return islice(self._infinite_indices(), self.rank, None, self.world_size)


class TrainingSampler(InfiniteSampler):
    """All samples of a dataset, without end, in a new order each epoch.

    Without ``shuffle`` they come in their own order.
    """

    @configurable
    def __init__(self, size: int, shuffle: bool = True, seed: int | None = None) -> None:
        super().__init__(seed)
        self.samples_per_epoch = _check_size(size)
        self._shuffle = shuffle

    @classmethod
    def from_config(cls, cfg: Any, dataset: Any) -> dict[str, Any]:
        return {"size": len(dataset), "seed": seed_of(cfg)}

    def epoch_indices(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self.samples_per_epoch, device="cpu")
        generator = new_generator(self.seed, 0, epoch)
        return torch.randperm(self.samples_per_epoch, generator=generator, device="cpu")


class InferenceSampler(Sampler[int]):
    """A contiguous part of ``range(size)`` per rank: each index once.

    The lengths of the parts differ by at most 1.
    """

    def __init__(self, size: int) -> None:
        self._local_indices = self._get_local_indices(
            _check_size(size), comm.get_data_world_size(), comm.get_data_rank()
        )

    @staticmethod
    def _get_local_indices(total_size: int, world_size: int, rank: int) -> range:
        # each of the first ``rest`` ranks takes one more sample
        share, rest = divmod(total_size, world_size)
        start = rank * share + min(rank, rest)
        next_rank = rank + 1
        end = next_rank * share + min(next_rank, rest)
        return range(start, end)

    def __iter__(self) -> Iterator[int]:
        return iter(self._local_indices)

    def __len__(self) -> int:
        return len(self._local_indices)


def _check_size(size: int) -> int:
    if not is_whole(size, 1):
        raise ValueError(f"size must be >= 1 sample, got {size}: is the dataset empty?")
    return size


def seed_of(cfg: Any) -> int | None:
    """The seed of a config; None if it must be drawn."""
    if cfg.SEED < 0:
        return None
    return cfg.SEED


def new_generator(seed: int, *key: int) -> torch.Generator:
    """A CPU generator that depends on the seed and the key.

    Generators with other seeds or keys are statistically independent: ``numpy.random.SeedSequence``
    mixes both. With ``seed + epoch``, runs with neighbouring seeds would share epochs.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=key)
    mixed_seed = sequence.generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(mixed_seed))
