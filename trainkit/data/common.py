"""Datasets that wrap other datasets."""

import bisect
import copy
import copyreg
import io
import logging
import math
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import IterableDataset, Sampler

from trainkit.utils.serialize import PicklableWrapper

__all__ = ["AspectRatioGroupedDataset", "DatasetFromList", "MapDataset", "ToIterableDataset"]

logger = logging.getLogger(__name__)

ENDS = StopIteration, SystemExit  # a dataset must not raise these when a sample is read
_MAX_NAMED = 5  # limit of sample names in the error for a batch
_WARN_AT_RETRY = 3


def add_note(error: Exception, text: str) -> None:
    """Show a text after the traceback of an error, also if a loader worker raised it; Python 3.10 logs it instead.

    A new error of another type would not be caught by code that expects this type.
    """
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        logger.error("%s: %s, %s", type(error).__name__, error, text)


def no_end(error: BaseException, doing: str) -> RuntimeError:
    """An error that replaces one of `ENDS`: a loader would treat those as the end of its data."""
    return RuntimeError(
        f"{type(error).__name__}{error.args or ''} while {doing}: it would end the data or their worker; "
        "raise another error, or catch it in the dataset"
    )


def name_sample(dataset: Any, index: Any) -> str:
    """The name of a sample by its index in the inner dataset, such as "sample 17 of Scans".

    If the dataset has a method ``sample_name(index)``, which may give a file name, this name is used.
    """
    if type(dataset) is MapDataset:
        return name_sample(dataset._dataset, index)
    has_parts = type(dataset) in (data.Subset, data.ConcatDataset)
    if has_parts and isinstance(index, int) and 0 <= index < len(dataset):
        if type(dataset) is data.Subset:
            return name_sample(dataset.dataset, dataset.indices[index])
        part = bisect.bisect_right(dataset.cumulative_sizes, index)
        return name_sample(dataset.datasets[part], index - (dataset.cumulative_sizes[part - 1] if part else 0))
    if hasattr(dataset, "sample_name"):
        return str(dataset.sample_name(index))
    name = dataset.name if type(dataset) is DatasetFromList else ""
    return f"sample {index} of {name or type(dataset).__name__}"


def name_samples(dataset: Any, indices: Sequence[Any]) -> str:
    """The names of the first samples of a batch."""
    names = [name_sample(dataset, index) for index in indices[:_MAX_NAMED]]
    return ", ".join(names) + (f" and {len(indices) - _MAX_NAMED} more" if len(indices) > _MAX_NAMED else "")


class MapDataset(data.Dataset[Any]):
    """A dataset with a function applied to each sample; if it returns None, another sample is used instead.

    Which other sample is used depends only on the index, not on workers or earlier samples, and needs no random state.
    With an ``IterableDataset`` the result is an ``IterableDataset``, which skips such samples.

    Args:
        dataset: map-style or iterable.
        map_func: sample -> sample, or None to reject it; for spawned workers it is pickled by `PicklableWrapper`.
    """

    def __new__(cls, dataset: Any, map_func: Callable[[Any], Any]) -> Any:
        # DataLoader tells the two kinds of datasets apart by class.
        if isinstance(dataset, IterableDataset) and not issubclass(cls, IterableDataset):
            return _MapIterableDataset(dataset, map_func)
        return super().__new__(cls)

    def __init__(self, dataset: Any, map_func: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._map_func = PicklableWrapper(map_func)

    def __getnewargs__(self) -> tuple[Any, Callable[[Any], Any]]:
        return self._dataset, self._map_func  # pickle calls __new__ with these

    def __len__(self) -> int:
        """The length, including rejected samples; TypeError if the dataset has no length."""
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        """The mapped sample of this index, or of another index if ``map_func`` rejects it.

        Raises:
            RuntimeError: ``map_func`` gave None for every sample of the dataset.
        """
        for retry, other in enumerate(chain([index], _others(int(index), len(self)))):
            if retry == _WARN_AT_RETRY:
                logger.warning("map_func gave None for sample %d and %d others; trying more", index, retry - 1)
            sample = self._map_func(self._dataset[other])
            if sample is not None:
                return sample
        raise RuntimeError(
            f"map_func gave None for each of the {len(self)} samples of the dataset; "
            "it may reject some of them, but must accept at least one"
        )


def _others(index: int, size: int) -> Iterator[int]:
    """Every other index once, in steps whose length is coprime to the size; the order depends on ``index`` alone."""
    rng, step = random.Random(index), size
    while size > 1 and math.gcd(step, size) != 1:
        step = rng.randrange(1, size)
    for k in range(1, size):
        yield (index + k * step) % size


class _MapIterableDataset(MapDataset, IterableDataset[Any]):
    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):  # these exist if the inner dataset has them
            return getattr(self._dataset, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __iter__(self) -> Iterator[Any]:
        for sample in self._dataset:  # not map(), which would end if the function raised StopIteration
            mapped = self._map_func(sample)
            if mapped is not None:
                yield mapped


class DatasetFromList(data.Dataset[Any]):
    """A list of samples as a dataset.

    Args:
        lst: any picklable samples.
        copy: return deep copies, so that changing a sample does not change the dataset. A serialized list always makes
            new samples.
        serialize: keep one buffer of pickled samples instead of the list. Workers share the buffer; with many small
            Python objects, reference counting would make each forked worker copy their memory. Or a function that makes
            another container of the list.
    """

    name = ""  # for errors and replays

    def __init__(
        self, lst: Sequence[Any], copy: bool = True, serialize: bool | Callable[[Sequence[Any]], Any] = True
    ) -> None:
        method = serialize if callable(serialize) else _serialize_methods[-1] if serialize else list
        self._samples = method(lst)
        self._copy = copy and method is not _PickledSamples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        sample = self._samples[index]
        return copy.deepcopy(sample) if self._copy else sample


class _PickledSamples:
    """Samples in one uint8 tensor, which forked workers share, and which spawned workers get in shared memory."""

    def __init__(self, samples: Iterable[Any]) -> None:
        buffer, ends = bytearray(), [0]
        for sample in samples:
            file = io.BytesIO()
            _SamplePickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(sample)
            buffer += file.getbuffer()
            ends.append(len(buffer))
        self._ends = torch.tensor(ends, dtype=torch.int64)
        self._buffer = torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of a dataset of {len(self)} samples")
        index = range(len(self))[index]  # a negative index counts from the end
        start, end = self._ends[index : index + 2].tolist()
        return pickle.loads(self._buffer.numpy()[start:end].data)


_serialize_methods: list[Callable[[Sequence[Any]], Any]] = [_PickledSamples]


@contextmanager
def set_default_dataset_from_list_serialize_method(new: Callable[[Sequence[Any]], Any]) -> Iterator[None]:
    """Context in which `DatasetFromList` with ``serialize=True`` keeps its samples in ``new(samples)``."""
    _serialize_methods.append(new)
    try:
        yield
    finally:
        _serialize_methods.remove(new)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    try:
        return torch.from_numpy, (tensor.numpy(),)
    except (TypeError, RuntimeError):  # not representable in NumPy, on another device, or requires grad
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


class _SamplePickler(pickle.Pickler):
    """Pickles tensors as arrays: loading takes 6 us instead of 80, and a view is saved without the rest of its
    storage."""

    dispatch_table = copyreg.dispatch_table.copy()
    dispatch_table[torch.Tensor] = _reduce_tensor


class ToIterableDataset(IterableDataset[Any]):
    """A map-style dataset as a stream, in the order of a sampler.

    Args:
        dataset: map-style.
        sampler: indices of this rank.
        shard_sampler: divide the indices between loader workers. Switch it off only if the sampler differs in each
            worker.
        shard_chunk_size: number of consecutive indices for the same worker. If it equals the batch size, batches are
            the same as without workers.

    Raises:
        TypeError: ``dataset`` is an ``IterableDataset``, or ``sampler`` is not a ``torch.utils.data.Sampler``.
        ValueError: ``shard_chunk_size`` is less than 1.
    """

    def __init__(
        self, dataset: Any, sampler: Sampler[int], shard_sampler: bool = True, shard_chunk_size: int = 1
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise TypeError(f"dataset must be map-style, got the iterable {type(dataset).__name__}; use it as it is")
        if not isinstance(sampler, Sampler):
            raise TypeError(f"sampler must be a torch.utils.data.Sampler, got {type(sampler).__name__}")
        if shard_chunk_size < 1:
            raise ValueError(f"shard_chunk_size must be >= 1 sample, got {shard_chunk_size}")
        self.dataset = dataset
        self.sampler = sampler
        self.shard_sampler = shard_sampler
        self._chunk_size = shard_chunk_size

    def __iter__(self) -> Iterator[Any]:
        indices: Iterator[int] = iter(self.sampler)
        worker = data.get_worker_info()
        if self.shard_sampler and worker is not None:
            chunks = enumerate(indices)
            num, size = worker.num_workers, self._chunk_size
            indices = (index for position, index in chunks if position // size % num == worker.id)
        for index in indices:
            try:
                sample = self.dataset[index]
            except ENDS as error:
                raise no_end(error, f"loading {name_sample(self.dataset, index)}") from error
            yield sample


class AspectRatioGroupedDataset(IterableDataset[list[Any]]):
    """Lists of ``batch_size`` samples; in a list, either all samples are wider than high, or none is.

    At the end of an iteration, samples of an incomplete list are kept for the next iteration.

    Args:
        dataset: dicts with ``width`` and ``height``.
    """

    def __init__(self, dataset: Iterable[Any], batch_size: int) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self._buckets: tuple[list[Any], list[Any]] = [], []

    def __iter__(self) -> Iterator[list[Any]]:
        for sample in self.dataset:
            bucket = self._buckets[sample["width"] > sample["height"]]
            bucket.append(sample)
            if len(bucket) == self.batch_size:
                batch = bucket[:]
                bucket.clear()  # before the yield: a loop that breaks after it has already used the batch
                yield batch
