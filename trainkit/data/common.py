"""Datasets that wrap other datasets, and a loader that gives only some batches."""

import copy
import io
import itertools
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import IterableDataset

from trainkit.utils.plugins import lending

__all__ = ["DatasetFromList", "MapDataset"]

__getattr__, __dir__ = lending(__name__)


class MapDataset(data.Dataset[Any]):
    """A dataset with a function applied to each sample.

    If the function returns None, another sample is used instead; which one depends only on the
    index. An ``IterableDataset`` becomes an ``IterableDataset``, which skips such samples.
    """

    def __new__(cls, dataset: Any, map_func: Callable[[Any], Any]) -> Any:
        # DataLoader tells the two kinds of datasets apart by class
        if isinstance(dataset, IterableDataset) and not issubclass(cls, IterableDataset):
            return _MapIterableDataset(dataset, map_func)
        return super().__new__(cls)

    def __init__(self, dataset: Any, map_func: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._map_func = map_func

    def __getnewargs__(self) -> tuple[Any, Callable[[Any], Any]]:
        return self._dataset, self._map_func  # pickle calls __new__ with these

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        """The mapped sample of this index, or of another index.

        Raises:
            RuntimeError: the function has rejected 1,000 samples.
        """
        others = random.Random(int(index))
        for _ in range(1000):
            sample = self._map_func(self._dataset[int(index)])
            if sample is not None:
                return sample
            index = others.randrange(len(self))
        raise RuntimeError("map_func gave None for 1000 samples, one after the other")


class _MapIterableDataset(MapDataset, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        # not map(), which would end if the function raised StopIteration
        for sample in self._dataset:
            mapped = self._map_func(sample)
            if mapped is not None:
                yield mapped


class DatasetFromList(data.Dataset[Any]):
    """A list of samples as a dataset.

    Args:
        copy: return deep copies. A serialized list always makes new samples.
        serialize: keep one buffer of pickled samples, which forked workers share: reference
            counting would make each of them copy the memory of small objects. Or a function that
            makes another container of the list.
    """

    def __init__(
        self,
        lst: Sequence[Any],
        copy: bool = True,
        serialize: bool | Callable[[Sequence[Any]], Any] = True,
    ) -> None:
        method: Callable[[Sequence[Any]], Any]
        if callable(serialize):
            method = serialize
        elif serialize:
            method = serialize_methods[-1]
        else:
            method = list
        self._samples = method(lst)
        self._copy = copy and method is not _PickledSamples

    @property
    def holds_plain_samples(self) -> bool:
        """Whether the samples are in a list or a buffer, not in a container of somebody else."""
        return type(self._samples) in (list, _PickledSamples)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        sample = self._samples[index]
        if self._copy:
            return copy.deepcopy(sample)
        return sample


class _PickledSamples:
    """Samples in one uint8 tensor, which workers share."""

    def __init__(self, samples: Sequence[Any]) -> None:
        file = io.BytesIO()
        ends = [0]
        for sample in samples:
            _SamplePickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(sample)
            ends.append(file.tell())
        self._ends = torch.tensor(ends, device="cpu")
        content = file.getbuffer() or bytearray(1)  # torch refuses an empty one
        self._buffer = torch.frombuffer(content, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]  # a negative index counts from the end
        start, end = self._ends[index : index + 2].tolist()
        return pickle.loads(self._buffer.numpy()[start:end].data)


class _SamplePickler(pickle.Pickler):
    """Pickles tensors as arrays.

    Loading takes 6 us instead of 45, and a view is saved without its whole storage.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor:
            return NotImplemented
        try:
            array = obj.numpy()
        except (TypeError, RuntimeError):  # no array: bfloat16, sparse, requires grad, on a device
            return NotImplemented
        return torch.from_numpy, (array,)


# the last one is in use
serialize_methods: list[Callable[[Sequence[Any]], Any]] = [_PickledSamples]


def first_batches(loader: Any, number: int) -> Any:
    """The first batches of a pass over ``loader``, by its own method ``first_batches(number)``.

    If it has none, a `FirstBatches`.
    """
    if hasattr(loader, "first_batches"):
        return loader.first_batches(number)
    return FirstBatches(loader, number)


class FirstBatches:
    """The first ``number`` batches of a loader. What the loader says about its batches stays."""

    def __init__(self, loader: Iterable[Any], number: int) -> None:
        self._loader = loader
        self._number = number
        self.collate_fn = getattr(loader, "collate_fn", None)
        if hasattr(loader, "num_samples"):
            self.num_samples = loader.num_samples

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._loader, self._number)
