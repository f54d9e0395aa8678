"""A DataLoader with a position that can be saved, and a separate random state for each sample."""

import copy
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from multiprocessing.sharedctypes import RawArray
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from trainkit.data.common import ENDS, DatasetFromList, ToIterableDataset, add_note, name_sample, name_samples, no_end
from trainkit.data.samplers.inference import InferenceSampler
from trainkit.data.samplers.infinite import InfiniteSampler, check_seed, new_generator
from trainkit.data.seeding import seed_globals, splitmix64, undisturbed_globals
from trainkit.data.tasks import Task, Tasks
from trainkit.data.watch import LOST, TIMEOUT, Deliveries
from trainkit.data.workers import check_socket_path, signals_held_back, worker_init_reset_seed
from trainkit.utils import comm, waiting

logger = logging.getLogger(__name__)

LOADER_KEY = 2  # samplers use other keys, so the seeds of workers are independent of the order


def trivial_batch_collator(batch: list[Any]) -> list[Any]:
    """Return the list of samples itself as the batch."""
    return batch


def resume_obstacle(loader: Iterable[Any]) -> str:
    """The reason why a loader's position cannot be saved, and the remedy; empty if it can.

    A loader with ``state_dict`` and ``load_state_dict`` is trusted, unless its attribute ``resume_obstacle`` is not
    empty. Three more attributes are optional: ``batches_per_epoch``; ``explain(error)``, which raises a clearer error;
    ``has_cheap_state``: whether the state may be read in each iteration.
    """
    if not _is_stateful(loader):
        return (
            f"the data loader ({type(loader).__name__}) has no state_dict() and load_state_dict(), so a resumed run "
            "starts its data again; use trainkit.data.build_batch_data_loader or ResumableLoader, or add these methods"
        )
    return getattr(loader, "resume_obstacle", "")


class ResumableLoader(DataLoader[Any]):
    """A ``DataLoader`` whose position can be saved, and whose samples do not depend on the process that loads them.

    Position: ``state_dict`` counts the delivered batches, not those loaded ahead. After ``load_state_dict`` the next
    ``iter()`` continues there, equally fast at every position, with any number of workers (and of ranks, if the sampler
    is an `InfiniteSampler`). Another sampler or batch sampler, or without workers an ``IterableDataset``, needs its own
    ``state_dict`` and ``load_state_dict``, and may have ``resume_obstacle`` and ``stream_start``, the samples of all
    ranks before the next ``iter()``. Its state is read after each batch, so it must count a sample before it
    yields the sample. ``resume_obstacle`` says why the position cannot be saved; it is empty if it can.

    Samples: before ``dataset[index]`` the global generators of Python, NumPy and torch are seeded from the seed and the
    sample's position in the stream of all ranks, so that random augmentation depends on these two alone. Without
    workers, the random state of the process is restored after each batch. Nothing is seeded if nothing is random (lists
    and tensors, collated by torch or this package), or if there is an obstacle.

    A `ToIterableDataset` is read by its indices: its batches are consecutive parts of the stream, with any workers. An
    error of a dataset or ``collate_fn`` gets a note that names the samples (on Python 3.10 a log line).

    Args:
        timeout: seconds that a worker may take for the next batch; 0: no limit. The error after this time, and a
            warning after 60 s, say what the worker does, and for which samples.
        seed: for augmentation; an `InfiniteSampler` has its own instead; None: ``torch.initial_seed()``.
        worker_init_fn: called after `worker_init_reset_seed`.
        kwargs: as for ``DataLoader``.

    Raises:
        ConfigError: with workers, if the path of the folder for temporary files is too long.
        ValueError: ``timeout`` is negative.
    """

    has_cheap_state = True

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int | None = None,
        timeout: float = 600,
        worker_init_fn: Callable[[int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs["worker_init_fn"] = partial(_start_worker, worker_init_fn)
        super().__init__(dataset, **kwargs)
        if timeout < 0:
            raise ValueError(f"timeout must be >= 0 s, got {timeout}; 0 waits for ever")
        self.timeout = timeout  # torch's timeout is used as the interval of our checks
        if self.num_workers > 0:
            check_socket_path()
        self._arguments = kwargs
        self._inside: DataLoader[Any] | None = None
        self._newest: weakref.ref[Deliveries] | None = None
        self._source: Any = dataset
        self._batches: Any = self.batch_sampler
        one_sampler = type(dataset) is ToIterableDataset and (dataset.shard_sampler or self.num_workers <= 1)
        if one_sampler and self.batch_size is not None:
            self._source = dataset.dataset
            self._batches = BatchSampler(dataset.sampler, self.batch_size, self.drop_last)
        self._is_stream = isinstance(self._source, IterableDataset)
        # this object decides the order of samples, so it has the state
        self._order: Any = dataset if self._is_stream else self._batches
        if type(self._order) is BatchSampler:
            self._order = self._order.sampler
        base = getattr(self._batches, "sampler", None)
        self._endless = base if isinstance(base, InfiniteSampler) else None
        is_inference = isinstance(base, InferenceSampler)
        self._own_seed = torch.initial_seed() if seed is None else check_seed(seed)
        self.resume_obstacle = self._find_obstacle()
        self._has_tasks = not self._is_stream and (is_inference or not self.resume_obstacle)
        rank, world_size = comm.get_data_rank(), comm.get_data_world_size()
        if self._endless is not None:
            rank, world_size = self._endless.rank, self._endless.world_size
        self._tasks = Tasks(self._batches, None if self.resume_obstacle else self._order, world_size, rank)
        if not self.resume_obstacle and kwargs.get("generator") is None:
            # otherwise each pass would use the global generator, and a resumed run may have more or fewer passes
            kwargs["generator"] = self.generator = new_generator(self._own_seed, LOADER_KEY, comm.get_data_rank())

    def state_dict(self) -> dict[str, Any]:
        """The position of the newest iterator after the delivered batches. Raises TypeError if there is an obstacle."""
        self._refuse_obstacle()
        return {"kind": type(self._order).__name__, "seed": self.seed, **self._tasks.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next ``iter()`` continues at the saved position; do not use older iterators any more.

        The seeds of the state replace those in use. If the state is from a sampler of another class, a warning is
        logged and the data starts again. Raises TypeError if there is an obstacle.
        """
        self._refuse_obstacle()
        kind = type(self._order).__name__
        if state["kind"] != kind:
            text = "The checkpoint's data order is from %s, which cannot be used with %s; the data starts again"
            logger.warning(text, state["kind"], kind)
            return
        self._order.load_state_dict(copy.deepcopy(state["order"]))
        self._own_seed = state["seed"]
        self._inside = None  # ends persistent workers, and drops the batches that they have loaded ahead
        self._tasks = replace(self._tasks, position=state["position"], passes=0 if state.get("over") else 1)

    def names_of_last(self, num_batches: int) -> list[list[str]]:
        """The sample names of the last delivered batches, as in errors; fewer batches if they are not known."""
        return [[name_sample(self._source, index) for index in batch] for batch in self._tasks.recent[-num_batches:]]

    def explain(self, error: RuntimeError) -> None:
        """
        Raises:
            RuntimeError: ``error`` says that a worker has ended (torch raises it anywhere in the code); the new error
                says what the worker did.
        """
        newest = None if self._newest is None else self._newest()
        if newest is not None:
            newest.explain(error)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        kept = self._inside if self.persistent_workers else None
        with signals_held_back():
            try:
                fetched = iter(self._start_inside() if kept is None else kept)
            except RuntimeError as error:
                if kept is None or not str(error).startswith((TIMEOUT, LOST)):
                    raise
                logger.warning("The workers of the last pass over the data are replaced by new ones: %s", error)
                fetched = iter(self._start_inside())
        deliveries = Deliveries(fetched, self._source, self._tasks, self.timeout)
        self._newest = weakref.ref(deliveries)
        return deliveries

    def _start_inside(self) -> DataLoader[Any]:
        source: Any = self.dataset
        poll = min(waiting.POLL_SEC, self.timeout or waiting.POLL_SEC) if self.num_workers else 0
        options = {**self._arguments, "collate_fn": self.collate_fn, "timeout": poll}
        if self._has_tasks:
            # a new object: an older iterator that is still in use keeps its own count
            notes = RawArray("q", 2 * self.num_workers) if self.num_workers else [0, 0]
            self._tasks = replace(self._tasks, notes=notes)
            draws = self.collate_fn not in (default_collate, trivial_batch_collator) or _may_draw(self._source)
            by_batch = bool(self.resume_obstacle)
            # an evaluation without workers may use the random numbers of the loop
            key = splitmix64(self.seed, 0) if draws and (self.num_workers > 0 or not by_batch) else None
            source = _Fetch(self._source, self.collate_fn, key, by_batch, notes)
            options |= {"batch_size": None, "sampler": self._tasks, "collate_fn": trivial_batch_collator}
            options |= {"shuffle": None, "batch_sampler": None, "drop_last": False}
        self._inside = DataLoader(source, **options)
        return self._inside

    @property
    def seed(self) -> int:
        """The seed of the random numbers of samples: the sampler's own seed if it has one."""
        return self._own_seed if self._endless is None else self._endless.seed

    def _find_obstacle(self) -> str:
        order, remedy = type(self._order).__name__, "a sampler of trainkit.data for training"
        if not self.in_order:
            return "in_order=False delivers the batches in an unknown order; leave it out"
        if self.batch_size is None and self.batch_sampler is None:
            return "with batch_size=None the delivered samples are not counted; give a batch size"
        if self._is_stream and self.num_workers > 0:
            return (
                f"each of the {self.num_workers} workers reads its own copy of the iterable dataset ({order}); "
                "set num_workers to 0, or give a map-style dataset"
            )
        if not _is_stateful(self._order):
            remedy = "a map-style dataset" if self._is_stream else remedy
            return (
                f"{order} has no state_dict() and load_state_dict(), so a resumed run starts its data again; "
                f"add them, or use {remedy}"
            )
        return getattr(self._order, "resume_obstacle", "")

    def _refuse_obstacle(self) -> None:
        if self.resume_obstacle:
            raise TypeError(f"the position of this loader cannot be saved or loaded: {self.resume_obstacle}")


@dataclass(eq=False)
class _Fetch(Dataset[Any]):
    """Makes batches.

    Attributes:
        key: for the seeds; None: nothing is seeded, for example if nothing uses random numbers.
        by_batch: seed whole batches, not each sample: for evaluations, since persistent workers would continue their
            random numbers.
        notes: see `Tasks`.
    """

    dataset: Any
    collate_fn: Callable[[list[Any]], Any]
    key: int | None
    by_batch: bool
    notes: MutableSequence[int]

    def __getitem__(self, task: Task) -> tuple[int, Any]:
        """(position after the batch, batch)."""
        worker = get_worker_info()
        # modulo: a loader without workers may run in a worker of another loader
        place = 0 if worker is None else 2 * worker.id % len(self.notes)
        self.notes[place : place + 2] = [task.after, 0]
        if self.key is not None and self.by_batch:
            seed_globals(splitmix64(self.key, task.first))
        key = None if self.by_batch else self.key
        doing, now = "loading", task.indices
        try:
            with nullcontext() if key is None or worker is not None else undisturbed_globals():
                if key is None and hasattr(self.dataset, "__getitems__"):
                    samples = self.dataset.__getitems__(task.indices)
                else:
                    samples = []
                    for index, position in zip(task.indices, count(task.first, task.stride), strict=False):
                        now = [index]
                        self.notes[place + 1] = len(samples)
                        if key is not None:
                            seed_globals(splitmix64(key, position))
                        samples.append(self.dataset[index])
                self.notes[place + 1] = len(task.indices)
                doing, now = "making a batch of", task.indices
                return task.after, self.collate_fn(samples)
        except ENDS as error:
            raise no_end(error, f"{doing} {name_samples(self.dataset, now)}") from error
        except Exception as error:
            add_note(error, f"while {doing} {name_samples(self.dataset, now)}")
            raise


def _start_worker(user_function: Callable[[int], None] | None, worker_id: int) -> None:
    worker_init_reset_seed(worker_id)
    worker: Any = get_worker_info()
    if isinstance(worker.dataset, _Fetch):
        object.__setattr__(worker, "dataset", worker.dataset.dataset)  # the user's code expects its own dataset there
    if user_function is not None:
        user_function(worker_id)


def _may_draw(dataset: Any) -> bool:
    """Whether reading a sample may use random numbers; for a subset or concatenation, its inner datasets decide."""
    if type(dataset) is ConcatDataset:
        return any(_may_draw(part) for part in dataset.datasets)
    if type(dataset) is Subset:
        return _may_draw(dataset.dataset)
    return type(dataset) not in (list, tuple, range, TensorDataset, DatasetFromList)


def _is_stateful(candidate: object) -> bool:
    return hasattr(candidate, "state_dict") and hasattr(candidate, "load_state_dict")
