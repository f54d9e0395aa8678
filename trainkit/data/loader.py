"""A DataLoader with a position that can be saved, and a separate random state for each sample."""

import copy
import logging
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import BatchSampler, DataLoader, default_collate, get_worker_info

from trainkit.data.common import DatasetFromList, MapDataset
from trainkit.data.samplers import InferenceSampler, InfiniteSampler, new_generator
from trainkit.data.seeding import seed_globals, splitmix64, undisturbed_globals
from trainkit.data.workers import signals_held_back, worker_init_reset_seed
from trainkit.utils import comm

logger = logging.getLogger(__name__)

LOADER_KEY = 2  # samplers use other keys, so the seeds of workers are independent of the order
_CUT_OFF = (ConnectionError, EOFError, FileNotFoundError)  # errors if a worker ends while it sends a batch


def trivial_batch_collator(batch: list[Any]) -> list[Any]:
    """Return the list of samples itself as the batch."""
    return batch


class ResumableLoader(DataLoader[Any]):
    """A ``DataLoader`` whose position can be saved, and whose samples do not depend on the process that loads them.

    The position counts the delivered samples of all ranks. After ``load_state_dict`` the next ``iter()`` continues
    there, with any number of workers: at once with an `InfiniteSampler`; with another sampler or batch sampler, if it
    has ``state_dict`` and ``load_state_dict``, by drawing the indices of the pass again, without loading. An
    ``IterableDataset`` with these methods takes part without workers. ``resume_obstacle`` says why it has no position.

    Before ``dataset[index]`` the global generators of Python, NumPy and torch are seeded from the seed and the sample's
    position in the stream, unless nothing is random (lists and tensors, collated by torch or this package), or there is
    an obstacle. Without workers, the random state of the process is restored after each batch.

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
        self._is_stream = isinstance(dataset, data.IterableDataset)
        self._draws = draws = _Draws(self.batch_sampler, seed)
        self._order: Any = dataset if self._is_stream else draws.order
        self.resume_obstacle = self._find_obstacle()
        if not self.resume_obstacle and self.generator is None:
            # otherwise each pass would use the global generator, and a resumed run may have more or fewer passes
            kwargs["generator"] = self.generator = new_generator(seed, LOADER_KEY, comm.get_data_rank())
        self._inside: DataLoader[Any] | None = None
        if not self._is_stream and draws.order is not None:
            if self.collate_fn not in (default_collate, trivial_batch_collator) or _may_draw(dataset):
                draws.seeds_samples = not self.resume_obstacle
                # an evaluation without workers may use the random numbers of the loop
                draws.seeds_batches = draws.is_test and self.num_workers > 0
            for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"):
                kwargs.pop(name, None)
            self._inside = DataLoader(_Samples(dataset), batch_sampler=draws, **kwargs)

    @property
    def seed(self) -> int:
        """The seed of the random numbers of samples: the sampler's own seed if it has one."""
        return self._draws.seed

    def state_dict(self) -> dict[str, Any]:
        """The position of the newest iterator after the delivered batches. Raises TypeError if there is an obstacle."""
        self._refuse_obstacle()
        state = {"position": 0, "order": _state_of(self._order)} if self._is_stream else self._draws.state()
        return {"kind": type(self._order).__name__, "seed": self.seed, **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next ``iter()`` continues at the saved position, with its seeds; do not use older iterators any more.

        If the state is from a sampler of another class, a warning is logged and the data starts again. Raises TypeError
        if there is an obstacle.
        """
        self._refuse_obstacle()
        if state["kind"] != (kind := type(self._order).__name__):
            text = "The checkpoint's data order is from %s, which cannot be used with %s; the data starts again"
            logger.warning(text, state["kind"], kind)
            return
        self._order.load_state_dict(copy.deepcopy(state["order"]))
        self._draws.load(state)

    def names_of_last(self, num_batches: int) -> list[list[str]]:
        """The sample names of the last delivered batches, as in errors; fewer batches if they are not known."""
        return [
            [name_samples(self.dataset, [index]) for index in batch] for batch in [*self._draws.recent][-num_batches:]
        ]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._draws.restart()
        with signals_held_back():
            fetched = super().__iter__() if self._inside is None else iter(self._inside)
        return _Deliveries(fetched, self._draws, self)

    def _find_obstacle(self) -> str:
        order = type(self._order).__name__
        if not self.in_order or self._order is None:
            return "in_order=False and batch_size=None have no position"
        if self._is_stream and self.num_workers > 0:
            return f"each worker reads its own copy of the {order}; set num_workers to 0, or give a map-style dataset"
        if not hasattr(self._order, "state_dict") or not hasattr(self._order, "load_state_dict"):
            return f"{order} has no state_dict() and load_state_dict(), so a resumed run starts its data again"
        return getattr(self._order, "resume_obstacle", "")

    def _refuse_obstacle(self) -> None:
        if self.resume_obstacle:
            raise TypeError(f"the position of this loader cannot be saved or loaded: {self.resume_obstacle}")


class _Draws(data.Sampler[list[tuple[int | None, Any]]]):
    """The batches of a loader as lists of (random bits or None, index); which it has drawn, and which are delivered.

    Attributes:
        order: the object that decides the order of samples, so it has the state.
        position: samples of the stream in the delivered batches.
        owed: (position after it, its number in the pass, indices) of each batch that is not delivered yet.
        recent: indices of the last delivered batches.
    """

    seeds_samples = seeds_batches = False

    def __init__(self, batches: Any, seed: int) -> None:
        sampler = getattr(batches, "sampler", None)
        self.batches, self.order = batches, sampler if type(batches) is BatchSampler else batches
        self.is_test = isinstance(sampler, InferenceSampler)
        self._endless: Any = sampler if isinstance(sampler, InfiniteSampler) else None
        self._own_seed = seed
        self._start: Any = None  # the state of the order before the pass
        self.position = self.number = 0
        self._is_loaded = self._is_started = False
        self.owed: deque[tuple[int, int, list[Any]]] = deque()
        self.recent: deque[list[Any]] = deque(maxlen=64)

    @property
    def seed(self) -> int:
        return self._own_seed if self._endless is None else self._endless.seed

    def state(self) -> dict[str, Any]:
        if not self._is_started:
            self.restart()
        if self.order is self._endless:
            return {"position": self.position, "order": self.order.state_dict(self.position)}
        return {"position": self.position, "order": self._start, "batches": self.number}

    def load(self, state: Mapping[str, Any]) -> None:
        self._own_seed, self._start = state["seed"], state["order"]
        self.position, self.number = state["position"], state.get("batches", 0)
        self._is_loaded = self._is_started = True

    def restart(self) -> None:
        """Start a pass: after loading a state where it says, else where the order goes on."""
        if self.order is self._endless:
            self.position = self.order.start
        elif self.is_test:
            self.position = 0  # each evaluation has the same random numbers
        if not self._is_loaded:
            self.number, self._start = 0, _state_of(self.order)
        self._is_loaded, self._is_started, self.owed = False, True, deque()

    def __iter__(self) -> Iterator[list[tuple[int | None, Any]]]:
        position, key, owed = self.position, splitmix64(self.seed, 0), self.owed
        rank, world_size = comm.get_data_rank(), comm.get_data_world_size()
        if self._endless is not None:
            rank, world_size = self._endless.rank, self._endless.world_size
        for number, drawn in enumerate(islice(self.batches, self.number, None), self.number + 1):
            indices, first = [*drawn], position + rank
            bits: list[int | None] = [None] * len(indices)
            if self.seeds_samples:
                bits = [splitmix64(key, first + i * world_size) for i in range(len(indices))]
            elif self.seeds_batches:
                bits[:1] = [splitmix64(key, first)]
            position += len(indices) * world_size
            owed.append((position, number, indices))
            yield [*zip(bits, indices, strict=True)]


def _state_of(order: Any) -> Any:
    is_needless = isinstance(order, InfiniteSampler) or not hasattr(order, "state_dict")
    return None if is_needless else copy.deepcopy(order.state_dict())


class _Deliveries(Iterator[Any]):
    """The batches from torch's iterator; counts them, and says in an error which batch was due."""

    def __init__(self, fetched: Iterator[Any], draws: _Draws, loader: ResumableLoader) -> None:
        self._fetched, self._draws, self._owed, self._loader = fetched, draws, draws.owed, loader

    def __next__(self) -> Any:
        has_workers, owed = self._loader.num_workers > 0, self._owed
        try:
            with undisturbed_globals() if self._draws.seeds_samples and not has_workers else nullcontext():
                batch = next(self._fetched)
        except StopIteration:
            raise
        except Exception as error:
            if owed:
                names = name_samples(self._loader.dataset, owed.popleft()[2])
                _add_note(error, f"while waiting for the batch of {names}")
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
        except Exception as error:
            name = name_samples(self.dataset, [index])
            if isinstance(error, StopIteration):  # it would end the data
                raise RuntimeError(f"StopIteration while loading {name}") from error
            _add_note(error, f"while loading {name}")
            if get_worker_info() is not None:
                _check_can_be_sent(error)
            raise


def _add_note(error: Exception, text: str) -> None:
    getattr(error, "add_note", logger.error)(text)  # Python 3.10 has no notes


def _check_can_be_sent(error: Exception) -> None:
    """Raises RuntimeError in place of an error that a worker cannot pickle: its loader would wait for it."""
    try:
        pickle.dumps(type(error))
    except Exception:
        raise RuntimeError(f"{type(error).__qualname__}: {error}") from error


def name_samples(dataset: Any, indices: list[Any]) -> str:
    """The names of the first samples of a batch; a dataset may have a method ``sample_name(index)`` for them."""
    while type(dataset) is MapDataset:
        dataset = dataset._dataset
    owner = getattr(dataset, "name", "") if type(dataset) is DatasetFromList else ""
    owner = owner or type(dataset).__name__
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


def _may_draw(dataset: Any) -> bool:
    """Whether reading a sample may use random numbers; for a subset or concatenation, its inner datasets decide."""
    if type(dataset) is data.ConcatDataset:
        return any(_may_draw(part) for part in dataset.datasets)
    if type(dataset) is data.Subset:
        return _may_draw(dataset.dataset)
    return type(dataset) not in (list, tuple, range, data.TensorDataset, DatasetFromList)
