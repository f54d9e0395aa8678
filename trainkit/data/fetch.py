"""Datasets that a loader puts around the user's.

In the process that loads the samples they seed them and tell the user's dataset the epoch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import default_collate, get_worker_info

from trainkit.data.common import DatasetFromList, MapDataset
from trainkit.data.epochs import EpochTeller
from trainkit.data.order import NOT_TOLD, Delivered, Draw
from trainkit.data.seeding import seed_globals, undisturbed_globals

_NOT_RANDOM = (list, tuple, range, data.TensorDataset)


def trivial_batch_collator(batch: list[Any]) -> list[Any]:
    """Return the list of samples itself as the batch."""
    return batch


class Batches(data.Dataset[tuple[Delivered, Any]]):
    """The batches of a map-style dataset, by `Draw`; each comes with the progress after it.

    The bits seed the global generators. Without workers, these are restored after each batch.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Any], teller: EpochTeller
    ) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn
        self._teller = teller

    def __getitem__(self, draw: Draw) -> tuple[Delivered, Any]:
        is_in_worker = get_worker_info() is not None
        if draw.bits and not is_in_worker:
            with undisturbed_globals():
                batch = self._load(draw)
        else:
            batch = self._load(draw)
        return draw.delivered, batch

    def _load(self, draw: Draw) -> Any:
        indices = draw.delivered.indices
        samples: list[Any] = []
        try:
            for i, index in enumerate(indices):
                if draw.epochs:
                    self._teller.tell(draw.epochs[i])
                if draw.bits:
                    seed_globals(draw.bits[i])
                samples.append(self.dataset[index])
            return self._collate_fn(samples)
        except Exception as error:
            # a StopIteration would end the data, and torch waits for ever for an error that cannot
            # be pickled
            if len(samples) < len(indices):
                doing = f"loading {sample_name(self.dataset, indices[len(samples)])}"
            else:
                names = [sample_name(self.dataset, index) for index in indices]
                doing = f"collating {', '.join(names)}"
            raise RuntimeError(f"{type(error).__qualname__} while {doing}: {error}") from error


class Stream(data.IterableDataset[Any]):
    """A stream that is told ``epoch``, a number in shared memory, at the start of each pass."""

    def __init__(self, dataset: Any, epoch: torch.Tensor, teller: EpochTeller) -> None:
        self.dataset = dataset
        self._epoch = epoch
        self._teller = teller

    def __iter__(self) -> Iterator[Any]:
        epoch = int(self._epoch)
        if epoch != NOT_TOLD:
            self._teller.tell(epoch)
        return iter(self.dataset)


def may_draw(dataset: Any, collate_fn: Any) -> bool:
    """Whether loading a batch may draw from the global generators.

    False only for types that are known not to.
    """
    if collate_fn not in (default_collate, trivial_batch_collator):
        return True
    if type(dataset) is data.Subset:
        return may_draw(dataset.dataset, collate_fn)
    if type(dataset) is data.ConcatDataset:
        return any(may_draw(part, collate_fn) for part in dataset.datasets)
    if type(dataset) is DatasetFromList:
        return not dataset.holds_plain_samples
    return type(dataset) not in _NOT_RANDOM


def sample_name(dataset: Any, index: Any) -> str:
    """The name of a sample; a dataset may have a method ``sample_name(index)`` for it."""
    while type(dataset) is MapDataset:
        dataset = dataset._dataset
    if hasattr(dataset, "sample_name"):
        return str(dataset.sample_name(index))
    return f"sample {index} of {type(dataset).__name__}"
