"""A DataLoader with a position that can be saved, and a separate random state for each sample."""

import copy
import logging
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import DataLoader, default_collate, get_worker_info

from trainkit.data.common import DatasetFromList, MapDataset
from trainkit.data.samplers import InferenceSampler, InfiniteSampler, new_generator
from trainkit.data.seeding import seed_globals, splitmix64, undisturbed_globals
from trainkit.data.workers import worker_init_reset_seed
from trainkit.utils import comm

logger = logging.getLogger(__name__)

LOADER_KEY = 2  # samplers use other keys, so the seeds of workers are independent of the order
_NOT_RANDOM = (list, tuple, range, data.TensorDataset, DatasetFromList)
_CUT_OFF = (ConnectionError, EOFError, FileNotFoundError)  # errors if a worker ends while it sends a batch


def trivial_batch_collator(batch: list[Any]) -> list[Any]:
    """Return the list of samples itself as the batch."""
    return batch


class ResumableLoader(DataLoader[Any]):
    """A ``DataLoader`` whose position can be saved, and whose samples do not depend on the process that loads them.

    The position counts the delivered samples of all ranks. After ``load_state_dict`` the next ``iter()`` continues
    there: at once with an `InfiniteSampler`; by drawing the indices of the pass again with another sampler or batch
    sampler that has ``state_dict`` and ``load_state_dict``; by these methods of an ``IterableDataset``, without
    workers. ``resume_obstacle`` says why there is no position; it is empty if there is one.

    Before ``dataset[index]`` the global generators of Python, NumPy and torch are seeded from the seed and the sample's
    position, unless nothing is random (lists and tensors, collated by torch or this package) or there is an obstacle.
    Without workers, the random state of the process is restored after each batch.

    Args:
        seed: for augmentation; an `InfiniteSampler` has its own instead; None: ``torch.initial_seed()``.
        timeout: seconds that the workers may take for the next batch; 0: no limit.
        worker_init_fn: called after `worker_init_reset_seed`.
        kwargs: as for ``DataLoader``.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int | None = None,
        timeout: float = 600,
        worker_init_fn: Callable[[int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs["timeout"] = timeout if kwargs.get("num_workers") else 0
        kwargs["worker_init_fn"] = partial(_start_worker, worker_init_fn)
        super().__init__(dataset, **kwargs)
        seed = torch.initial_seed() if seed is None else seed
        is_stream = isinstance(dataset, data.IterableDataset)
        self._draws = draws = _Draws(self.batch_sampler, dataset if is_stream else None, seed)
        self.resume_obstacle = self._find_obstacle(is_stream)
        if not self.resume_obstacle and self.generator is None:
            # otherwise each pass would use the global generator, and a resumed run may have more or fewer passes
            kwargs["generator"] = self.generator = new_generator(seed, LOADER_KEY, comm.get_data_rank())
        self._inside: DataLoader[Any] | None = None
        if not is_stream and self.batch_sampler is not None:
            if type(dataset) not in _NOT_RANDOM or self.collate_fn not in (default_collate, trivial_batch_collator):
                draws.seeds_samples = not self.resume_obstacle
                # an evaluation without workers may use the random numbers of the loop
                draws.seeds_batches = draws.is_test and self.num_workers > 0
            for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"):
                kwargs.pop(name, None)
            kwargs |= {"batch_sampler": draws, "collate_fn": partial(_collate, self.collate_fn)}
            self._inside = DataLoader(_Samples(dataset), **kwargs)

    def _find_obstacle(self, is_stream: bool) -> str:
        order = self._draws.order
        if not self.in_order or order is None:
            return "with in_order=False or batch_size=None the delivered samples are not counted"
        if is_stream and self.num_workers > 0:
            return f"each worker has its own copy of the {type(order).__name__}; give num_workers=0 or indexed samples"
        if not hasattr(order, "state_dict") or not hasattr(order, "load_state_dict"):
            return f"{type(order).__name__} has no state_dict() and load_state_dict()"
        return getattr(order, "resume_obstacle", "")

    @property
    def seed(self) -> int:
        """The seed of the random numbers of samples: the sampler's own seed if it has one."""
        return self._draws.seed

    def state_dict(self) -> dict[str, Any]:
        """The position of the newest iterator after the delivered batches, if there is no obstacle."""
        return {"kind": type(self._draws.order).__name__, "seed": self.seed, **self._draws.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next ``iter()`` continues at the saved position, with its seeds; do not use older iterators any more.

        If the state is from a sampler of another class, the data starts again, with a warning.
        """
        if state["kind"] != (kind := type(self._draws.order).__name__):
            text = "The checkpoint's data order is from %s, which cannot be used with %s; the data starts again"
            logger.warning(text, state["kind"], kind)
        else:
            self._draws.load(state)

    def names_of_last(self, num_batches: int) -> list[list[str]]:
        """The sample names of the last delivered batches, as in errors; fewer batches if they are not known."""
        batches = [*self._draws.recent][-num_batches:]
        return [[_names(self.dataset, [index]) for index in batch] for batch in batches]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._draws.restart()
        return _Deliveries(super().__iter__() if self._inside is None else iter(self._inside), self._draws, self)


class _Draws(data.Sampler[list[tuple[int | None, Any]]]):
    """The batches of a loader as lists of (random bits or None, index); counts which of them are delivered.

    Attributes:
        order: the object that decides the order of samples, so it has the state.
        position, number: samples of the stream, and batches of the pass, that are delivered.
        owed: (position after it, its number, indices) of each batch of the pass that is not delivered yet.
        recent: indices of the last delivered batches.
    """

    seeds_samples = seeds_batches = False

    def __init__(self, batches: Any, stream: Any, seed: int) -> None:
        sampler: Any = getattr(batches, "sampler", None)
        self._batches, self._stream, self._own_seed = batches, stream, seed
        self.order: Any = sampler if type(batches) is data.BatchSampler else batches
        if stream is not None:
            self.order = stream
        self.is_test = isinstance(sampler, InferenceSampler)
        self._endless: Any = sampler if isinstance(sampler, InfiniteSampler) else None
        self._start: Any = None  # the state of the order before the pass
        self._is_loaded = False
        self.position = self.number = 0
        self.owed: Any = None  # a deque after the start of the first pass
        self.recent: deque[list[Any]] = deque(maxlen=64)

    @property
    def seed(self) -> int:
        return self._own_seed if self._endless is None else self._endless.seed

    def state(self) -> dict[str, Any]:
        if self.owed is None or self._stream is not None:
            self.restart()
        if self.order is self._endless:
            return {"position": self.position, "order": self.order.state_dict(self.position)}
        return {"position": self.position, "order": self._start, "batches": self.number}

    def load(self, state: Mapping[str, Any]) -> None:
        self.order.load_state_dict(copy.deepcopy(state["order"]))
        self._own_seed, self._start, self._is_loaded = state["seed"], state["order"], True
        self.position, self.number, self.owed = state["position"], state.get("batches", 0), deque()

    def restart(self) -> None:
        """Start a pass: after loading a state where it says, else where the order goes on."""
        if self._endless is not None and self.order is self._endless:
            self.position, self.number = self._endless.start, 0
        elif not self._is_loaded:
            self.number = 0
            self._start = copy.deepcopy(self.order.state_dict()) if hasattr(self.order, "state_dict") else None
        self._is_loaded, self.owed = False, deque()

    def __iter__(self) -> Iterator[list[tuple[int | None, Any]]]:
        rank, world_size, owed = comm.get_data_rank(), comm.get_data_world_size(), self.owed
        if self._endless is not None:
            rank, world_size = self._endless.rank, self._endless.world_size
        position, key = 0 if self.is_test else self.position, splitmix64(self.seed, 0)
        for number, drawn in enumerate(islice(self._batches, self.number, None), self.number + 1):
            indices, first = [*drawn], position + rank
            bits: list[int | None] = [None] * len(indices)
            if self.seeds_samples:
                bits = [splitmix64(key, first + i * world_size) for i in range(len(indices))]
            elif self.seeds_batches:  # each evaluation has the same random numbers
                bits[:1] = [splitmix64(key, first)]
            position += len(indices) * world_size
            owed.append((position, number, indices))
            yield [*zip(bits, indices, strict=True)]


class _Deliveries(Iterator[Any]):
    """The batches from torch's iterator; counts them, and says in an error which batch was due."""

    def __init__(self, fetched: Iterator[Any], draws: _Draws, loader: ResumableLoader) -> None:
        self._fetched, self._draws, self._owed, self._loader = fetched, draws, draws.owed, loader
        # If Python collects a cycle of objects, such as a trainer and its hooks, it closes the queues in it first, and
        # torch then waits 5 s for each worker. Held here, torch's iterator is in no cycle.
        if loader.num_workers > 0:
            weakref.finalize(self, id, fetched).atexit = False

    def __next__(self) -> Any:
        has_workers, owed = self._loader.num_workers > 0, self._owed
        try:
            with undisturbed_globals() if self._draws.seeds_samples and not has_workers else nullcontext():
                batch = next(self._fetched)
        except StopIteration:
            raise
        except Exception as error:
            if owed:
                _add_note(error, f"while waiting for the batch of {_names(self._loader.dataset, owed.popleft()[2])}")
            if has_workers and isinstance(error, _CUT_OFF) and not str(error).startswith("Caught "):
                raise RuntimeError(f"a loader worker has ended while it sent a batch: {error!r}") from error
            raise
        if owed:
            delivered = owed.popleft()
            if self._draws.owed is owed:  # otherwise there is a newer iterator
                self._draws.position, self._draws.number, indices = delivered
                self._draws.recent.append(indices)
        return batch


class _Samples(data.Dataset[Any]):
    """The samples of a dataset by (random bits, index); the bits seed the global generators before each sample."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, key: tuple[int | None, Any]) -> Any:
        bits, index = key
        if bits is not None:
            seed_globals(bits)
        try:
            return self.dataset[index]
        except StopIteration as error:  # it would end the data
            raise RuntimeError(f"StopIteration while loading {_names(self.dataset, [index])}") from error
        except Exception as error:
            _add_note(error, f"while loading {_names(self.dataset, [index])}")
            _check_can_be_sent(error)
            raise


def _collate(collate_fn: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    try:
        return collate_fn(samples)
    except Exception as error:
        _check_can_be_sent(error)
        raise


def _check_can_be_sent(error: Exception) -> None:
    """Raises RuntimeError in place of an error that a worker cannot pickle: its loader would wait for it."""
    try:
        pickle.dumps(None if get_worker_info() is None else type(error))
    except Exception:
        raise RuntimeError(f"{type(error).__qualname__}: {error}") from error


def _add_note(error: Exception, text: str) -> None:
    getattr(error, "add_note", logger.error)(text)  # Python 3.10 has no notes


def _names(dataset: Any, indices: list[Any]) -> str:
    """The names of the first samples of a batch; a dataset may have a method ``sample_name(index)`` for them."""
    while type(dataset) is MapDataset:
        dataset = dataset._dataset
    owner = getattr(dataset, "name", "") or type(dataset).__name__
    name = getattr(dataset, "sample_name", lambda index: f"sample {index} of {owner}")
    more = f" and {len(indices) - 5} more" if len(indices) > 5 else ""
    return ", ".join(str(name(index)) for index in indices[:5]) + more


def _start_worker(user_function: Callable[[int], None] | None, worker_id: int) -> None:
    worker_init_reset_seed(worker_id)
    worker: Any = get_worker_info()
    if isinstance(worker.dataset, _Samples):
        object.__setattr__(worker, "dataset", worker.dataset.dataset)  # the user's code expects its own dataset there
    if user_function is not None:
        user_function(worker_id)
