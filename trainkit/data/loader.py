"""A DataLoader with a position that can be saved, and a separate random state for each sample.

The way of a batch: `Order` draws its indices, in this process and ahead of time. torch's DataLoader
gives them to a worker, where `Batches` loads the samples. `_Deliveries` hands the batch to the
caller, and counts it. A stream has no indices: there torch's DataLoader iterates `Stream`.
"""

import logging
import multiprocessing
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from typing import Any, cast

import torch
from torch.utils import data
from torch.utils.data import DataLoader, get_worker_info

from trainkit.data.epochs import EpochTeller, listeners_in
from trainkit.data.fetch import Batches, Stream, may_draw, sample_name, trivial_batch_collator
from trainkit.data.order import NOT_TOLD, Order, Progress
from trainkit.data.protocol import has_position
from trainkit.data.samplers import InfiniteSampler, new_generator
from trainkit.data.workers import starting, worker_init_reset_seed
from trainkit.utils import comm

logger = logging.getLogger(__name__)

LOADER_KEY = 2  # samplers use other keys, so the seeds of workers are independent of the order


class ResumableLoader(DataLoader[Any]):
    """A ``DataLoader`` whose position can be saved.

    Its samples do not depend on the process that loads them.

    *Position.* It counts the delivered samples of all ranks. After ``load_state_dict`` the next
    ``iter()`` continues there: at once with an `InfiniteSampler`; by drawing the indices of the
    pass again with another sampler or batch sampler that has ``state_dict`` and
    ``load_state_dict``. ``resume_obstacle`` says why there is no position.

    *Random states.* Before ``dataset[index]`` the global generators of Python, NumPy and torch are
    seeded from the seed and the sample's position. There are no seeds for lists, ranges and a
    ``TensorDataset``, also inside a `DatasetFromList`, ``Subset`` or ``ConcatDataset``, that torch
    or this package collates: nothing draws there. Without workers, the generators are restored
    after each batch.

    *Epochs.* A dataset with ``set_epoch(epoch)``, also inside a wrapper (see `listeners_in`), is
    told the epoch of each sample in the process that loads it. With an `InfiniteSampler` this is
    the epoch of the sample's position; a batch may have samples of two epochs. With another
    sampler, and for a stream, it is the number that `set_epoch` gave for this pass; a trainer calls
    it. An evaluation, with an `InferenceSampler`, tells no epoch.

    The length of a stream is that of a pass whose samples are divided evenly among the workers.

    Args:
        seed: for augmentation; an `InfiniteSampler` has its own instead; None:
            ``torch.initial_seed()``.
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
        has_workers = kwargs.get("num_workers", 0) > 0
        kwargs["timeout"] = timeout if has_workers else 0
        kwargs["worker_init_fn"] = partial(_start_worker, worker_init_fn)
        super().__init__(dataset, **kwargs)
        if seed is None:
            seed = torch.initial_seed()
        self._is_stream = isinstance(dataset, data.IterableDataset)
        self._order = Order(self.batch_sampler, seed)
        self._recent: deque[list[Any]] = deque(maxlen=64)  # indices of the last delivered batches
        self.resume_obstacle = self._find_obstacle()
        if not self.resume_obstacle and self.generator is None:
            # else each pass would draw from the global generator, and a resumed run may have more
            # or fewer passes
            self.generator = new_generator(seed, LOADER_KEY, comm.get_data_rank())
            kwargs["generator"] = self.generator
        self._stream_epoch = torch.tensor(NOT_TOLD, device="cpu")
        self._inside = self._make_inside(kwargs)

    def _make_inside(self, kwargs: dict[str, Any]) -> DataLoader[Any] | None:
        """The loader of torch that does the work.

        It loads `Batches`, for a dataset with indices, or a `Stream` that is told its epoch. None:
        this loader itself works as torch's, for single samples and other streams.
        """
        listeners: list[Any] = []
        if not self._order.is_test:
            listeners = listeners_in(self.dataset)
        if listeners:
            self._say_who_is_told(listeners)
        self._order.tells_epochs = bool(listeners)
        teller = EpochTeller(listeners)
        if self._is_stream:
            if not listeners:
                return None
            # workers that stay for several passes read the epoch of each pass
            self._stream_epoch.share_memory_()
            return DataLoader(Stream(self.dataset, self._stream_epoch, teller), **kwargs)
        if self._has_single_samples:
            return None
        if self._order.is_test or not self.resume_obstacle:
            self._order.seeds_samples = may_draw(self.dataset, self.collate_fn)
        for name in ("shuffle", "batch_sampler", "drop_last"):
            kwargs.pop(name, None)
        kwargs |= {
            "sampler": self._order,  # gives whole batches
            "batch_size": None,
            "collate_fn": trivial_batch_collator,
        }
        return DataLoader(Batches(self.dataset, self.collate_fn, teller), **kwargs)

    @property
    def _has_single_samples(self) -> bool:
        """Whether it gives single samples, with ``batch_size=None``, of a dataset with indices."""
        return self._order.source is None and not self._is_stream

    def _say_who_is_told(self, listeners: list[Any]) -> None:
        names = ", ".join(type(listener).__name__ for listener in listeners)
        logger.info("set_epoch(epoch) is called in each process that loads samples: %s", names)
        workers_stay = self.persistent_workers or isinstance(self.sampler, InfiniteSampler)
        if self._has_single_samples and self.num_workers > 0 and workers_stay:
            logger.warning(
                "With batch_size=None and workers that stay, the epoch does not reach %s; give a "
                "batch size",
                names,
            )

    @property
    def epoch_listeners(self) -> list[Any]:
        """What a trainer tells the epoch before each pass.

        See `trainkit.data.epochs.epoch_listeners`. These are the sampler and the batch sampler, as
        far as they have ``set_epoch``; and this loader, if its dataset has it and the sampler is
        not endless.
        """
        in_dataset = listeners_in(self.dataset)
        found: list[Any] = []
        if self._has_single_samples:
            found.extend(in_dataset)  # nobody else tells them
        elif self._order.tells_epochs and self._order.endless is None:
            found.append(self)
        if not self._is_stream:
            samplers = self.sampler if self.batch_sampler is None else self.batch_sampler
            # a sampler may hold the dataset, which is not told from here
            found.extend(listeners_in(samplers, except_for=[self.dataset, *in_dataset]))
        return found

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the passes that start from now on.

        Without effect on an endless sampler, which knows its own.
        """
        self._order.epoch = epoch

    def __len__(self) -> int:
        """The number of batches of a pass.

        Raises:
            TypeError: the data have no length.
        """
        if not self._is_stream or not self.num_workers or self.batch_size is None:
            return super().__len__()
        size = len(cast(Sized, self.dataset))
        smallest_share, num_larger = divmod(size, self.num_workers)
        num_batches = 0
        for worker in range(self.num_workers):
            share = smallest_share
            if worker < num_larger:
                share += 1
            num_batches += share // self.batch_size
            if share % self.batch_size and not self.drop_last:
                num_batches += 1
        return num_batches

    # ------------------------------------------------------------------ state

    @property
    def seed(self) -> int:
        """The seed of samples: the sampler's own seed if it has one."""
        return self._order.seed

    def _find_obstacle(self) -> str:
        source = self._order.source
        if not self.in_order or source is None:
            return "with in_order=False or batch_size=None the delivered samples are not counted"
        if self._is_stream:
            return (
                f"a {type(self.dataset).__name__} has no indices; add them, or use a loader that "
                "has a state_dict()"
            )
        if not has_position(source):
            return f"{type(source).__name__} has no state_dict() and load_state_dict()"
        return getattr(source, "resume_obstacle", "")

    def state_dict(self) -> dict[str, Any]:
        """The position of the newest iterator, after the delivered batches.

        Only if there is no obstacle.
        """
        return {"kind": type(self._order.source).__name__, "seed": self.seed, **self._order.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next ``iter()`` continues at the saved position, with its seeds.

        Do not use older iterators any more. If the state is from a sampler of another class, the
        data starts again, with a warning.
        """
        kind = type(self._order.source).__name__
        if state["kind"] != kind:
            logger.warning(
                "The checkpoint's data order is from %s, which cannot be used with %s; the data "
                "starts again",
                state["kind"],
                kind,
            )
            return
        self._order.load(state)

    def names_of_last(self, num_batches: int) -> list[list[str]]:
        """The sample names of the last delivered batches, as in errors.

        Fewer batches if they are not known.
        """
        names = []
        for indices in list(self._recent)[-num_batches:]:
            names.append([sample_name(self.dataset, index) for index in indices])
        return names

    # ------------------------------------------------------------------ batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._is_stream:
            self._stream_epoch.fill_(self._order.epoch)
            return self._fetch()
        if self._inside is None:
            return self._fetch()
        progress = self._order.start_pass()
        return _Deliveries(progress, self._fetch(), self._recent)

    def _fetch(self) -> Iterator[Any]:
        """torch's iterator, which starts the workers."""
        if self.num_workers == 0:
            return self._iterate()
        context: Any = self.multiprocessing_context or multiprocessing
        with starting(context.get_start_method()):
            return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        if self._inside is None:
            return super().__iter__()
        return iter(self._inside)


class _Deliveries(Iterator[Any]):
    """The batches from torch's iterator; counts them."""

    def __init__(
        self, progress: Progress, fetched: Iterator[Any], recent: deque[list[Any]]
    ) -> None:
        self._progress = progress
        self._fetched = fetched
        self._recent = recent
        # If Python collects a cycle of objects, such as a trainer and its hooks, it closes the
        # queues in it first, and torch then waits 5 s for each worker. Held here, torch's iterator
        # is in no cycle.
        weakref.finalize(self, id, fetched).atexit = False

    def __next__(self) -> Any:
        delivered, batch = next(self._fetched)
        self._progress.position = delivered.position
        self._progress.num_batches = delivered.num_batches
        self._recent.append(delivered.indices)
        return batch


def _start_worker(user_function: Callable[[int], None] | None, worker_id: int) -> None:
    worker_init_reset_seed(worker_id)
    worker: Any = get_worker_info()
    if isinstance(worker.dataset, Batches | Stream):
        # the user's code expects its own dataset there
        object.__setattr__(worker, "dataset", worker.dataset.dataset)
    if user_function is not None:
        user_function(worker_id)
