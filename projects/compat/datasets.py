"""Datasets of detectron2."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch.utils.data import IterableDataset, Sampler, get_worker_info

from trainkit.data.common import serialize_methods
from trainkit.data.epochs import EpochTeller, listeners_in
from trainkit.data.samplers import InfiniteSampler


@contextmanager
def set_default_dataset_from_list_serialize_method(
    new: Callable[[Sequence[Any]], Any],
) -> Iterator[None]:
    """Context in which `DatasetFromList` with ``serialize=True`` keeps its samples in ``new(samples)``."""
    serialize_methods.append(new)
    try:
        yield
    finally:
        serialize_methods.remove(new)


class ToIterableDataset(IterableDataset[Any]):
    """A map-style dataset as a stream, in the order of a sampler of this rank.

    The loaders of trainkit read it by its indices, if ``shard_sampler`` is true: batches are consecutive parts of the
    order, with any number of workers. ``shard_sampler``: divide the indices between loader workers; False: the sampler
    differs in each worker. ``shard_chunk_size``: number of consecutive indices for the same worker. If it equals the
    batch size, batches are the same as without workers.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: Sampler[int],
        shard_sampler: bool = True,
        shard_chunk_size: int = 1,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self._chunk_size = shard_chunk_size
        self.indexed = (dataset, sampler) if shard_sampler else None

    def __iter__(self) -> Iterator[Any]:
        num_workers = 1
        own = 0
        worker = get_worker_info()
        if worker is not None and self.indexed:
            num_workers = worker.num_workers
            own = worker.id
        listeners = listeners_in(self.dataset)
        knows_epoch = isinstance(self.sampler, InfiniteSampler) and bool(listeners)
        teller = EpochTeller(listeners)
        for position, index in enumerate(self.sampler):
            chunk = position // self._chunk_size
            if chunk % num_workers != own:
                continue
            if knows_epoch:
                sampler = cast(InfiniteSampler, self.sampler)
                place = sampler.start + position * sampler.world_size + sampler.rank
                epoch, _ = sampler.locate(place)
                teller.tell(epoch)
            yield self.dataset[index]


class AspectRatioGroupedDataset(IterableDataset[list[Any]]):
    """Lists of ``batch_size`` dicts with ``width`` and ``height``, of which either all are wider than high, or none is.

    At the end of an iteration, samples of an incomplete list are kept for the next iteration.
    """

    def __init__(self, dataset: Iterable[Any], batch_size: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self._wide: list[Any] = []
        self._others: list[Any] = []

    def __iter__(self) -> Iterator[list[Any]]:
        for sample in self.dataset:
            is_wide = sample["width"] > sample["height"]
            bucket = self._wide if is_wide else self._others
            bucket.append(sample)
            if len(bucket) == self.batch_size:
                batch = bucket[:]
                bucket.clear()  # before the yield: a loop that breaks after it has already used the batch
                yield batch
