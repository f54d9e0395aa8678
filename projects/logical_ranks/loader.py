"""The batches of the logical ranks of a process."""

import copy
from collections.abc import Iterator, Mapping, Sized
from fractions import Fraction
from itertools import islice
from operator import attrgetter
from typing import Any, cast

from torch.utils.data import BatchSampler

from trainkit.config import ConfigError
from trainkit.data.loader import ResumableLoader
from trainkit.data.protocol import batches_per_epoch
from trainkit.data.samplers import InferenceSampler, InfiniteSampler
from trainkit.utils import comm


def divide(loader: Any, num: int, steps: int = 1) -> "LogicalLoader | LogicalTestLoader":
    """The loader of this process, made from the loader of one logical rank of ``num``.

    ``loader`` is built under ``comm.set_data_ranks(comm.get_rank(), num)``; ``steps`` are the micro-batches of a
    logical rank per iteration. Raises ConfigError: its batches cannot be divided.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler = None
    if type(batches) is BatchSampler:
        sampler = batches.sampler
    if isinstance(sampler, InfiniteSampler):
        return LogicalLoader(loader, num, steps)
    if isinstance(sampler, InferenceSampler):
        return LogicalTestLoader(loader, num)
    raise ConfigError(
        f"SOLVER.LOGICAL_RANKS: got a loader with the sampler {type(sampler).__name__}; "
        "accepted: a map-style dataset "
        "with a sampler of trainkit.data"
    )


class LogicalLoader:
    """In each iteration the ``steps`` micro-batches of the first logical rank of this process, then of the next, ...

    Each logical rank has a loader of its own, with at least one worker if there are any. Everything else is as for the
    loader of one of them. ``logical_ranks`` are those of all processes.
    """

    def __init__(self, loader: ResumableLoader, logical_ranks: int, steps: int) -> None:
        self.logical_ranks = logical_ranks
        self.steps = steps
        own = own_ranks(logical_ranks)
        workers_of_each = max(1, loader.num_workers // len(own))
        self._loaders: list[ResumableLoader] = []
        for rank in own:
            batches = _of_rank(loader, rank, logical_ranks)
            self._loaders.append(_like(loader, batches, workers_of_each))

    # what others ask of a loader
    dataset = property(attrgetter("_first.dataset"))
    sampler = property(attrgetter("_first.sampler"))
    batch_sampler = property(attrgetter("_first.batch_sampler"))
    batch_size = property(attrgetter("_first.batch_size"))
    drop_last = property(attrgetter("_first.drop_last"))
    num_workers = property(attrgetter("_first.num_workers"))
    collate_fn = property(attrgetter("_first.collate_fn"))
    seed = property(attrgetter("_first.seed"))
    resume_obstacle = property(attrgetter("_first.resume_obstacle"))
    epoch_listeners = property(attrgetter("_first.epoch_listeners"))

    @property
    def _first(self) -> ResumableLoader:
        return self._loaders[0]

    def __iter__(self) -> Iterator[Any]:
        iterators = [iter(loader) for loader in self._loaders]
        while True:
            for iterator in iterators:
                yield from islice(iterator, self.steps)

    @property
    def batches_per_epoch(self) -> Fraction:
        return Fraction(batches_per_epoch(self._first) or 0) * len(self._loaders)

    def state_dict(self) -> dict[str, Any]:
        return self._first.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for loader in self._loaders:
            loader.load_state_dict(state)

    def names_of_last(self, num_batches: int) -> list[list[str]]:
        """The samples of the last ``num_batches``, which are those of whole iterations."""
        each = num_batches // len(self._loaders)
        names: list[list[str]] = []
        for loader in self._loaders:
            names += loader.names_of_last(each)
        return names


class LogicalTestLoader(ResumableLoader):
    """Each logical rank has a contiguous share of the samples; no batch has samples of two of them."""

    def __init__(
        self, loader: ResumableLoader, logical_ranks: int, most: int | None = None
    ) -> None:
        self._given = loader
        self._logical_ranks = logical_ranks
        num_samples = len(cast(Sized, loader.dataset))
        batch_size = cast(int, loader.batch_size)
        share_of = InferenceSampler._get_local_indices
        batches = _Batches()
        for rank in share_of(logical_ranks, comm.get_world_size(), comm.get_rank()):
            share: Any = share_of(num_samples, logical_ranks, rank)
            batches += islice(BatchSampler(share, batch_size, drop_last=False), most)
        batches.sampler = cast(Any, loader.batch_sampler).sampler
        arguments = _arguments(loader, loader.num_workers)
        super().__init__(loader.dataset, batch_sampler=batches, **arguments)

    def first_batches(self, num: int) -> "LogicalTestLoader":
        """This loader, with at most ``num`` batches of each logical rank."""
        return LogicalTestLoader(self._given, self._logical_ranks, num)


class _Batches(list[list[int]]):
    sampler: InferenceSampler  # by its class the loader knows that this is an evaluation


def _of_rank(loader: ResumableLoader, rank: int, num: int) -> BatchSampler:
    batches: Any = loader.batch_sampler
    sampler = copy.copy(batches.sampler)
    sampler.rank = rank
    sampler.world_size = num
    return BatchSampler(sampler, batches.batch_size, drop_last=True)


def _like(loader: ResumableLoader, batches: BatchSampler, num_workers: int) -> ResumableLoader:
    arguments = _arguments(loader, num_workers if loader.num_workers else 0)
    return ResumableLoader(loader.dataset, batch_sampler=batches, **arguments)


def _arguments(loader: ResumableLoader, num_workers: int) -> dict[str, Any]:
    return {
        "num_workers": num_workers,
        "seed": loader.seed,
        "timeout": loader.timeout,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "persistent_workers": loader.persistent_workers,
        "prefetch_factor": loader.prefetch_factor,
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator,
        "multiprocessing_context": loader.multiprocessing_context,
    }


def own_ranks(num: int) -> list[int]:
    """The logical ranks of this process, of ``num``; neighbours in this order have the same parent in the tree.

    Logical rank ``i`` has the samples ``p`` of the stream with ``p % num == i``. A process has those whose remainder by
    the number of processes is its own rank: a whole subtree of the sum over logical ranks. A node of the tree is a set
    of ranks that are equal modulo ``m``; its children are the sets of those that are equal modulo ``2 m``.
    """
    owned = [comm.get_rank()]
    stride = comm.get_world_size()
    while stride < num:
        children = []
        for rank in owned:
            children += [rank, rank + stride]
        owned = children
        stride *= 2
    return owned
