"""The endless stream of samples that the ranks share."""

import itertools
import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from operator import attrgetter

import numpy as np
import torch
from torch.utils.data import Sampler

from trainkit.config.config import CfgNode
from trainkit.utils import comm

logger = logging.getLogger(__name__)

_BLOCK = 1 << 16  # number of indices converted to Python ints at a time: a list of 1e8 would take gigabytes


class InfiniteSampler(Sampler[int], ABC):
    """Epochs 0, 1, 2, ... of a dataset without end; the ranks take samples in turn.

    The order of an epoch depends on ``(seed, epoch)`` alone, and sample ``p`` of the global stream goes to rank ``p %
    world_size``. So any number of ranks draws the same global batches, and the stream can start at any position. Every
    ``iter()`` starts at ``start``.

    Args:
        seed: the same on all ranks, >= 0. None: all ranks share a random seed, so every rank must create the sampler.

    Raises:
        ValueError: the seed is negative; pass None for a config's SEED -1.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = comm.shared_random_seed() if seed is None else check_seed(seed)
        self.rank = comm.get_data_rank()  # stored, since a spawned loader worker has no process group
        self.world_size = comm.get_data_world_size()
        self.start = 0

    _seed = property(attrgetter("seed"))  # detectron2's names, which subclasses use
    _rank = property(attrgetter("rank"))
    _world_size = property(attrgetter("world_size"))

    @property
    @abstractmethod
    def samples_per_epoch(self) -> int:
        """Samples over all ranks in one epoch."""

    @abstractmethod
    def epoch_indices(self, epoch: int) -> torch.Tensor:
        """The dataset indices of one epoch over all ranks, in order, int64 ``[N]``."""

    def set_position(self, num_samples: int) -> None:
        """Start the next ``iter()`` after the first ``num_samples`` >= 0 of the stream, counted over all ranks."""
        if num_samples < 0:
            raise ValueError(f"num_samples must be >= 0 samples of the global stream, got {num_samples}")
        self.start = num_samples

    def state_dict(self, position: int | None = None) -> dict[str, int]:
        """The seed, and ``position`` in samples of the global stream; default is ``start``."""
        return {"seed": self.seed, "position": self.start if position is None else position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Start the next ``iter()`` at the position of the state, in the order of its seed."""
        if state["seed"] != self.seed:
            logger.info(
                "The data continues in the order of the checkpoint's seed %d, not of %d", state["seed"], self.seed
            )
        self.seed = check_seed(state["seed"])
        self.set_position(state["position"])

    def locate(self, position: int) -> tuple[int, int]:
        """(epoch, offset in it) of a sample of the global stream."""
        return divmod(position, self.samples_per_epoch)

    def _infinite_indices(self) -> Iterator[int]:
        """The global stream; if a subclass overrides this, as for detectron2, positions are reached by iterating."""
        for epoch in itertools.count():
            yield from self.epoch_indices(epoch).tolist()

    def __iter__(self) -> Iterator[int]:
        if type(self)._infinite_indices is not InfiniteSampler._infinite_indices:
            yield from itertools.islice(self._infinite_indices(), self.start + self.rank, None, self.world_size)
            return
        epoch, offset = self.locate(self.start)
        offset += self.rank
        while True:
            indices = self.epoch_indices(epoch)
            share = indices[offset :: self.world_size]
            for block in share.split(_BLOCK):
                yield from block.tolist()
            offset += len(share) * self.world_size - len(indices)  # the stride continues in the next epoch
            epoch += 1


def check_seed(seed: int) -> int:
    """The seed as an int; a TypeError if it is not an integer, a ValueError if it is negative."""
    seed = operator.index(seed)
    if seed < 0:
        raise ValueError(f"seed must be None (drawn at random) or >= 0, got {seed}; turn a config's SEED -1 into None")
    return seed


def seed_of(cfg: CfgNode) -> int | None:
    """The seed of a config; None if it must be drawn."""
    return None if cfg.SEED < 0 else cfg.SEED


def new_generator(seed: int, *key: int) -> torch.Generator:
    """A CPU generator that depends on the seed and the key; different generators are statistically independent.

    ``numpy.random.SeedSequence`` mixes both: with ``seed + epoch``, runs with neighbouring seeds would share epochs.
    """
    state = np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))
