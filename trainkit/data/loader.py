"""A DataLoader with a position that can be saved, and a separate random state for each sample."""

import copy
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from trainkit.config.errors import ConfigError
from trainkit.data.common import ENDS, DatasetFromList, ToIterableDataset, add_note, name_sample, no_end
from trainkit.data.samplers.grouped import GroupedBatchSampler
from trainkit.data.samplers.inference import InferenceSampler
from trainkit.data.samplers.infinite import InfiniteSampler, check_seed, new_generator
from trainkit.data.seeding import seed_globals, splitmix64, undisturbed_globals
from trainkit.data.watch import Owed, Watch, WorkerNotes, is_of_lost_worker, is_timeout
from trainkit.data.workers import WorkerInit, check_socket_path, signals_held_back
from trainkit.utils import comm, waiting
from trainkit.utils.logical import own_ranks

logger = logging.getLogger(__name__)

LOADER_KEY = 2  # the samplers have other keys: workers' seeds are independent of the orders
_MAX_NAMED = 5  # limit of sample names in the error for a batch
_MAX_REMEMBERED = 64  # number of delivered batches whose samples can be named


def trivial_batch_collator(batch: list[Any]) -> list[Any]:
    """Return the list of samples itself as the batch."""
    return batch


def resume_obstacle(loader: Iterable[Any]) -> str:
    """The reason why a loader's position cannot be saved, and the remedy; empty if it can.

    A loader with ``state_dict`` and ``load_state_dict`` is trusted, unless its attribute ``resume_obstacle`` is not
    empty.
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
    ``iter()`` continues there, equally fast everywhere, with any number of workers and, if the sampler is an
    `InfiniteSampler`, of ranks. Another sampler or batch sampler, or without workers an ``IterableDataset``, needs its
    own ``state_dict`` and ``load_state_dict``. Its state is read after each batch, so it must count a sample before it
    yields the sample. ``resume_obstacle`` says why the position cannot be saved; it is empty if it can.

    Samples: before ``dataset[index]`` the global generators of Python, NumPy and torch are seeded from the seed and the
    sample's position in the stream of all ranks, so that random augmentation depends on these two alone. Without
    workers, the random state of the process is restored after each batch. Nothing is seeded if nothing is random (lists
    and tensors, collated by torch or this package), or if there is an obstacle.

    A `ToIterableDataset` is read by its indices: its batches are consecutive parts of the stream, with any workers. An
    error of a dataset or ``collate_fn`` gets a note with the samples (on Python 3.10 a log line).

    Args:
        timeout: seconds that a worker may take for the next batch; 0: no limit. Then an error says what the worker
            does, and for which samples; after 60 s a warning does.
        seed: for augmentation, unless the sampler is an `InfiniteSampler` with its own; None: ``torch.initial_seed()``.
        worker_init_fn: called after `worker_init_reset_seed`.
        logical_ranks: if not 0, training batches are those of the `trainkit.utils.logical` ranks of this process, one
            after the other.
        kwargs: as for ``DataLoader``.

    Raises:
        ConfigError: with workers, if the path of the folder for temporary files is too long; ``logical_ranks`` with a
            sampler that is not of this package.
        ValueError: ``timeout`` is negative.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int | None = None,
        timeout: float = 600,
        worker_init_fn: Callable[[int], None] | None = None,
        logical_ranks: int = 0,
        **kwargs: Any,
    ) -> None:
        kwargs["worker_init_fn"] = WorkerInit(worker_init_fn)
        super().__init__(dataset, **kwargs)
        if timeout < 0:
            raise ValueError(f"timeout must be >= 0 s, got {timeout}; 0 waits for ever")
        self.timeout = timeout  # torch's timeout is used as the interval of our checks
        self.logical_ranks = logical_ranks
        if self.num_workers > 0:
            check_socket_path()
        # the inner loader fetches whole batches, so it does not get these options
        done_by_fetch = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn"}
        self._options = {name: value for name, value in kwargs.items() if name not in done_by_fetch}
        self._inside: DataLoader[Any] | None = None
        self._watch: Watch
        self._source: Any = dataset
        self._batches: Any = self.batch_sampler
        one_sampler = type(dataset) is ToIterableDataset and (dataset.shard_sampler or self.num_workers <= 1)
        if one_sampler and self.batch_size is not None:
            self._source = dataset.dataset
            self._batches = BatchSampler(dataset.sampler, self.batch_size, self.drop_last)
        self._is_stream = isinstance(self._source, IterableDataset)
        # the object that decides the order of samples, and so has the state
        self._order: Any = dataset if self._is_stream else self._batches
        if type(self._order) is BatchSampler:
            self._order = self._order.sampler
        base = getattr(self._batches, "sampler", None)
        self._endless = base if isinstance(base, InfiniteSampler) else None
        self._is_inference = isinstance(base, InferenceSampler)
        if logical_ranks and not self._is_inference:
            self._divide_batches()
        self._own_seed = torch.initial_seed() if seed is None else check_seed(seed)
        self.resume_obstacle = self._find_obstacle()
        self._tasks = self._new_tasks(position=0)
        if not self.resume_obstacle and self._options.get("generator") is None:
            # otherwise each pass would use the global generator, and a resumed run may have more or fewer passes
            self._options["generator"] = self.generator = new_generator(
                self._own_seed, LOADER_KEY, comm.get_data_rank()
            )

    def state_dict(self) -> dict[str, Any]:
        """The position of the newest iterator after the delivered batches. Raises TypeError if there is an obstacle."""
        self._refuse_obstacle()
        position, order = self._tasks.state()
        state = {"kind": type(self._order).__name__, "seed": self.seed, "position": position, "order": order}
        return {**state, "over": True} if self._tasks.over else state

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
        self._inside = None  # ends persistent workers, with the batches that they have loaded ahead
        self._tasks = self._new_tasks(state["position"], "over" if state.get("over") else "here")

    def names_of_last(self, num_batches: int) -> list[list[str]]:
        """The sample names of the last delivered batches, as in errors; fewer batches if they are not known."""
        return [[name_sample(self._source, index) for index in batch] for batch in [*self._tasks.recent][-num_batches:]]

    def explain(self, error: RuntimeError) -> None:
        """
        Raises:
            RuntimeError: ``error`` says that a worker has ended (torch raises this at any place); the new one says what
                it did.
        """
        if self._inside is not None:
            self._watch.explain(error, self._tasks.owed)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        is_kept = self._inside is not None and self.persistent_workers
        if not is_kept:
            self._start_inside()
        elif self._is_inference:
            self._tasks.position = 0  # each evaluation is the same, also in its random numbers
        with signals_held_back():
            try:
                fetched = self._watch.iterate(self._inside)
            except RuntimeError as error:
                if not is_kept or not (is_timeout(error) or is_of_lost_worker(error)):
                    raise
                logger.warning("The workers of the last pass over the data are replaced by new ones: %s", error)
                self._start_inside()
                fetched = self._watch.iterate(self._inside)
        return _Deliveries(fetched, None if self._loads_plainly() else self._tasks, self._watch)

    def _loads_plainly(self) -> bool:
        return self._is_stream or bool(self.resume_obstacle and not self._is_inference)

    def _start_inside(self) -> None:
        notes = None
        source: Any = self.dataset
        if self._is_stream:
            what: dict[str, Any] = {"batch_size": self.batch_size, "drop_last": self.drop_last}
        elif not self._loads_plainly():
            # a new object: an older iterator that is still in use keeps its own count
            self._tasks = self._new_tasks(0 if self._is_inference else self._tasks.position, self._tasks.stage)
            notes = WorkerNotes(self.num_workers) if self.num_workers else None
            source, what = self._fetch(notes), {"batch_size": None, "sampler": self._tasks}
        elif self.batch_sampler is None:
            what = {"batch_size": None, "sampler": self.sampler}
        else:
            what = {"batch_sampler": self.batch_sampler}
        collate_fn = trivial_batch_collator if source is not self.dataset else self.collate_fn
        poll = min(waiting.POLL_SEC, self.timeout or waiting.POLL_SEC) if self.num_workers else 0
        self._watch = Watch(notes, self.timeout, self._fetch().name)
        self._inside = DataLoader(source, timeout=poll, collate_fn=collate_fn, **what, **self._options)

    @property
    def seed(self) -> int:
        """The seed of the random numbers of samples: the sampler's own seed if it has one."""
        return self._own_seed if self._endless is None else self._endless.seed

    def _new_tasks(self, position: int, stage: "_Stage" = "here") -> "_Tasks":
        rank, world_size = comm.get_data_rank(), comm.get_data_world_size()
        if self._endless is not None:
            rank, world_size = self._endless.rank, self._endless.world_size
        logical_ranks = (0 if self._is_inference else self.logical_ranks) or world_size
        owned, order = own_ranks(logical_ranks, rank, world_size), None if self.resume_obstacle else self._order
        return _Tasks(self._batches, order, position, world_size, owned, stage)

    def _fetch(self, notes: WorkerNotes | None = None) -> "_Fetch":
        draws = self.collate_fn not in (default_collate, trivial_batch_collator) or _may_draw(self._source)
        key = splitmix64(self.seed, 0) if draws else None
        # persistent workers would continue their random numbers; without workers, an evaluation may use the loop's
        batch_key = key if self._is_inference and self.num_workers else None
        sample_key = None if self.resume_obstacle else key
        return _Fetch(
            dataset=self._source, collate_fn=self.collate_fn, key=sample_key, notes=notes, batch_key=batch_key
        )

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
        if isinstance(self._order, GroupedBatchSampler) and self._endless is None:
            return f"GroupedBatchSampler has no position in a {type(self._order.sampler).__name__}; give it {remedy}"
        return ""

    def _divide_batches(self) -> None:
        if self._endless is None or type(self._batches) is not BatchSampler:
            raise ConfigError(
                f"SOLVER.LOGICAL_RANKS needs batches that it can divide, got those of {type(self._order).__name__}; "
                "take a map-style dataset with a sampler of trainkit.data, or set it to 0"
            )
        # so many are drawn at once, and dealt out to the logical ranks
        size = self._batches.batch_size * self.logical_ranks // self._endless.world_size
        self._batches = BatchSampler(self._endless, size, drop_last=True)

    def _refuse_obstacle(self) -> None:
        if self.resume_obstacle:
            raise TypeError(f"the position of this loader cannot be saved or loaded: {self.resume_obstacle}")


class _Task(NamedTuple):
    """A batch: the position after it, its indices, the position of its first sample, the distance to the next one."""

    after: int
    indices: Any
    first: int
    stride: int


_Stage: TypeAlias = Literal["here", "over", "skipped"]


class _Tasks(Sampler[_Task]):
    """Tells the inner loader what to fetch, and remembers what was delivered.

    Args:
        order: the object that decides the order of samples; None: its state is not needed.
        owned: the ranks, or logical ranks, among which each of ``batches`` is divided, in this order.

    Attributes:
        position: number of samples of the stream in the delivered batches.
        over: whether the last delivered batch was not full and so ends this pass. A `BatchSampler` has exhausted its
            sampler then, and the sampler's state belongs to the next pass.
        stage: "over" after loading such a state: the next pass is empty, like the rest of the pass in a run without a
            stop. After that "skipped": some samplers make an empty pass themselves, which is left out.
    """

    def __init__(
        self, batches: Any, order: Any, position: int, world_size: int, owned: Sequence[int], stage: "_Stage"
    ) -> None:
        self._batches, self._order, self._world_size, self._owned = batches, order, world_size, owned
        self.position, self.stage, self.over = position, stage, stage != "here"
        self._started = False
        self._state: Any = None  # state of the order after the delivered batches
        self._ahead: dict[int, tuple[Any, bool]] = {}  # position after a batch -> the same state, and `over`
        self.owed: Owed = {}  # requested batches that are not delivered
        self.recent: deque[Any] = deque(maxlen=_MAX_REMEMBERED)  # indices of delivered batches

    def state(self) -> tuple[int, Any]:
        """The position, and the state of the order there."""
        if not self._started:
            self._start()
        endless = isinstance(self._order, InfiniteSampler)
        return self.position, self._order.state_dict(self.position) if endless else self._state

    def delivered(self, position: int) -> None:
        self.position = position
        for after in [after for after in self.owed if after <= position]:  # includes batches that failed
            self.recent.append(self.owed.pop(after))
        self._state, self.over = self._ahead.pop(position, (None, False))

    def __iter__(self) -> Iterator[_Task]:
        self._start()
        self._started = True
        return self._draw()

    def _start(self) -> None:
        if isinstance(self._order, InfiniteSampler | GroupedBatchSampler):
            self.position = self._order.start
        self._ahead.clear()
        self.owed.clear()
        self._state = self._order_state()

    def _draw(self) -> Iterator[_Task]:
        stage, start = self.stage, self.position
        self.stage, self.over = ("skipped", True) if stage == "over" else ("here", False)
        position = start
        full = self._batches.batch_size if type(self._batches) is BatchSampler else 0
        for _ in range({"over": 0, "here": 1, "skipped": 2}[stage]):
            for drawn in self._batches:
                here, num = position, len(self._owned)
                for rank in self._owned:
                    indices = drawn if num == 1 else drawn[rank // self._world_size :: num]
                    position += len(indices) * self._world_size
                    self.owed[position] = indices
                    state = self._order_state()
                    if state is not None:
                        self._ahead[position] = state, len(indices) < full
                    yield _Task(position, indices, here + rank, num * self._world_size)
            if position > start:
                return

    def _order_state(self) -> Any:
        # the state of an endless sampler is a function of the position
        is_needless = self._order is None or isinstance(self._order, InfiniteSampler)
        return None if is_needless else copy.deepcopy(self._order.state_dict())


class _Deliveries(Iterator[Any]):
    """The iterator of a loader.

    Args:
        fetched: (position, batch) pairs; batches alone without ``tasks``.
    """

    def __init__(self, fetched: Iterator[Any], tasks: _Tasks | None, watch: Watch) -> None:
        self._fetched, self._tasks, self._watch = fetched, tasks, watch
        # Python's cycle collection, such as of a trainer with a checkpointer, would close the workers' queues before
        # torch can tell the workers to end, and torch waits 5 s for each worker. Held here, the queues are not part of
        # a cycle.
        queues = [getattr(fetched, name, None) for name in ("_index_queues", "_worker_result_queue")]
        weakref.finalize(self, id, queues).atexit = False

    def __next__(self) -> Any:
        try:
            fetched = self._watch.next(self._fetched, {} if self._tasks is None else self._tasks.owed)
        except waiting.Abandoned:
            self._watch.end_workers()
            raise
        if self._tasks is None:
            return fetched
        waiting.waiter.get().since = None  # a delivered batch must not be abandoned
        # the position comes with the batch, so that it is correct after a failed fetch too
        position, batch = fetched
        self._tasks.delivered(position)
        return batch


class _Fetch(Dataset[Any]):
    """Batches by task. Other attributes are the dataset's, as in ``get_worker_info().dataset.file = ...``.

    Args:
        key: for the samples' seeds; None: neither dataset nor ``collate_fn`` uses random numbers.
        notes: of the workers; None without workers.
        batch_key: for the seeds of whole batches, in workers.
    """

    def __init__(self, **own: Any) -> None:
        self.__dict__.update({f"_{name}": value for name, value in own.items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle asks for such names before there is a dataset
            raise AttributeError(name)
        return getattr(self.__dict__["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, task: Any) -> Any:
        """(position after the batch, batch) of a task; for an index, the dataset's sample."""
        if type(task) is not _Task:
            return self._dataset[task]
        after, indices, position, stride = task
        place = None if self._notes is None else self._notes.begin(after)
        if self._batch_key is not None and place is not None:
            seed_globals(splitmix64(self._batch_key, position))
        alone = self._key is None or get_worker_info() is not None
        doing, now = "loading", indices
        try:
            with nullcontext() if alone else undisturbed_globals():
                if self._key is None and hasattr(self._dataset, "__getitems__"):
                    samples = self._dataset.__getitems__(indices)
                else:
                    samples = []
                    for index in indices:
                        now = [index]
                        if place is not None:
                            self._notes.count(place, len(samples))
                        if self._key is not None:
                            seed_globals(splitmix64(self._key, position))
                        samples.append(self._dataset[index])
                        position += stride
                if place is not None:
                    self._notes.count(place, len(indices))
                doing, now = "making a batch of", indices
                return after, self._collate_fn(samples)
        except ENDS as error:
            raise no_end(error, f"{doing} {self.name(now)}") from error
        except Exception as error:
            add_note(error, f"while {doing} {self.name(now)}")
            raise

    def name(self, indices: Sequence[Any]) -> str:
        names = [name_sample(self._dataset, index) for index in indices[:_MAX_NAMED]]
        return ", ".join(names) + (f" and {len(indices) - _MAX_NAMED} more" if len(indices) > _MAX_NAMED else "")


def _may_draw(dataset: Any) -> bool:
    """Whether reading a sample may use random numbers; for a subset or concatenation, its inner datasets decide."""
    if type(dataset) is ConcatDataset:
        return any(_may_draw(part) for part in dataset.datasets)
    if type(dataset) is Subset:
        return _may_draw(dataset.dataset)
    return type(dataset) not in (list, tuple, range, TensorDataset, DatasetFromList)


def _is_stateful(candidate: object) -> bool:
    return hasattr(candidate, "state_dict") and hasattr(candidate, "load_state_dict")
