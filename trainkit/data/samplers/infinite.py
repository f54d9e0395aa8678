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

from trainkit.utils import comm

logger = logging.getLogger(__name__)

_BLOCK = 1 << 16  # indices that become Python ints at a time: an epoch of 1e8 samples as a list takes gigabytes


class InfiniteSampler(Sampler[int], ABC):
    """Epochs 0, 1, 2, ... of a dataset, one after the other without end, dealt out to the ranks in turn.

    The global stream is a function: the order of an epoch depends on ``(seed, epoch)`` alone, and sample ``p`` of the
    stream goes to rank ``p % world_size``. So any number of ranks draws the same global batches, and the stream can be
    entered at any position. Every ``iter()`` starts at ``start``.

    Args:
        seed: the same on all ranks, >= 0. None: drawn at random and agreed on, so every rank must make the sampler.

    Raises:
        ValueError: the seed is negative; a config's "no seed" must become None, not one particular order.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = comm.shared_random_seed() if seed is None else check_seed(seed)
        self.rank = comm.get_rank()  # kept, as a spawned loader worker knows no process group
        self.world_size = comm.get_world_size()
        self.start = 0

    _seed = property(attrgetter("seed"))  # detectron2's names, for subclasses
    _rank = property(attrgetter("rank"))
    _world_size = property(attrgetter("world_size"))

    @property
    @abstractmethod
    def samples_per_epoch(self) -> int:
        """Samples over all ranks in what counts as one pass over the data."""

    @abstractmethod
    def epoch_indices(self, epoch: int) -> torch.Tensor:
        """The dataset indices of one epoch over all ranks, in order, int64 ``[N]``."""

    def set_position(self, num_samples: int) -> None:
        """Let the next ``iter()`` start after the first ``num_samples`` >= 0 of the stream, counted over all ranks."""
        if num_samples < 0:
            raise ValueError(f"num_samples must be >= 0 samples of the global stream, got {num_samples}")
        self.start = num_samples

    def state_dict(self, position: int | None = None) -> dict[str, int]:
        """The seed, and the ``position`` in samples of the global stream; default: that at which ``iter()`` starts."""
        return {"seed": self.seed, "position": self.start if position is None else position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next ``iter()`` start at the position of the state, in the order of its seed."""
        if state["seed"] != self.seed:
            logger.info(
                "The data goes on in the order of the checkpoint's seed %d, not of %d", state["seed"], self.seed
            )
        self.seed = check_seed(state["seed"])
        self.set_position(state["position"])

    def locate(self, position: int) -> tuple[int, int]:
        """The epoch and the offset in it of a sample of the global stream, without walking there."""
        return divmod(position, self.samples_per_epoch)

    def _infinite_indices(self) -> Iterator[int]:
        """The global stream; one that a subclass defines itself, as for detectron2, is walked through to ``start``."""
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
            offset += len(share) * self.world_size - len(indices)  # the stride goes on in the next epoch
            epoch += 1


def check_seed(seed: int) -> int:
    """The seed as an int; a TypeError if it is no integer, a ValueError if it is negative."""
    seed = operator.index(seed)
    if seed < 0:
        raise ValueError(f"seed must be None (drawn at random) or >= 0, got {seed}; turn a config's SEED -1 into None")
    return seed


def new_generator(seed: int, *key: int) -> torch.Generator:
    """A CPU generator whose state depends on the seed and the key; different ones are statistically independent.

    ``numpy.random.SeedSequence`` does the mixing: with ``seed + epoch`` a run would repeat the epochs of the run with
    the next seed.
    """
    state = np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))
