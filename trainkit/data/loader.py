"""A DataLoader with a position that can be saved, and a separate random state for each sample."""

import copy
import logging
import multiprocessing
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from multiprocessing import resource_tracker
from operator import attrgetter
from typing import Any, cast

import torch
from torch.utils import data
from torch.utils.data import DataLoader, default_collate, get_worker_info

from trainkit.data.common import DatasetFromList, MapDataset
from trainkit.data.epochs import EpochTeller, listeners_in
from trainkit.data.samplers import InferenceSampler, InfiniteSampler, new_generator
from trainkit.data.seeding import seed_globals, splitmix64, undisturbed_globals
from trainkit.utils import comm
from trainkit.utils.env import seed_all_rng, stop_signals
from trainkit.utils.periods import check_period

logger = logging.getLogger(__name__)

LOADER_KEY = 2  # samplers use other keys, so the seeds of workers are independent of the order
_NOT_RANDOM = (list, tuple, range, data.TensorDataset)
_NOT_TOLD = -1  # nobody has said which epoch it is
_POLL_SEC = 5.0  # interval of a worker's checks whether its parent is alive


def trivial_batch_collator(batch: list[Any]) -> list[Any]:
    """Return the list of samples itself as the batch."""
    return batch


class ResumableLoader(DataLoader[Any]):
    """A ``DataLoader`` whose position can be saved, and whose samples do not depend on the process that loads them.

    The position counts the delivered samples of all ranks. After ``load_state_dict`` the next ``iter()`` continues
    there: at once with an `InfiniteSampler`; by drawing the indices of the pass again with another sampler or batch
    sampler that has ``state_dict`` and ``load_state_dict``. ``resume_obstacle`` says why there is no position.

    Before ``dataset[index]`` the global generators of Python, NumPy and torch are seeded from the seed and the sample's
    position. There are no seeds for lists, ranges and a ``TensorDataset``, also inside a `DatasetFromList`, ``Subset``
    or ``ConcatDataset``, that torch or this package collates: nothing draws there. Without workers, the generators are
    restored after each batch.

    A dataset with ``set_epoch(epoch)``, also inside a wrapper (see `listeners_in`), is told the epoch of each sample in
    the process that loads it. With an `InfiniteSampler` this is the epoch of the sample's position; a batch may have
    samples of two epochs. With another sampler, and for a stream, it is the number that `set_epoch` gave for this pass;
    a trainer calls it. An evaluation, with an `InferenceSampler`, tells no epoch.

    The length of a stream is that of a pass whose samples are divided evenly among the workers.

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
        self._order = order = _Order(self.batch_sampler, seed)
        self._recent: deque[list[Any]] = deque(maxlen=64)  # indices of the last delivered batches
        self.resume_obstacle = self._find_obstacle()
        if not self.resume_obstacle and self.generator is None:
            # otherwise each pass would use the global generator, and a resumed run may have more or fewer passes
            kwargs["generator"] = self.generator = new_generator(
                seed, LOADER_KEY, comm.get_data_rank()
            )
        self._inside: DataLoader[Any] | None = None
        self._is_stream = isinstance(dataset, data.IterableDataset)
        listeners = [] if order.is_test else listeners_in(dataset)
        order.tells_epochs = bool(listeners)
        if listeners:
            self._say_who_is_told(listeners)
        teller = EpochTeller(listeners)
        self._stream_epoch = torch.tensor(_NOT_TOLD, device="cpu")
        if self._is_stream and listeners:
            # workers that stay for several passes read the epoch of each pass
            self._stream_epoch.share_memory_()
            self._inside = DataLoader(_Stream(dataset, self._stream_epoch, teller), **kwargs)
        elif order.source is not None and not self._is_stream:
            if order.is_test or not self.resume_obstacle:
                order.seeds_samples = _may_draw(dataset, self.collate_fn)
            for name in ("shuffle", "batch_sampler", "drop_last"):
                kwargs.pop(name, None)
            kwargs |= {"sampler": order, "batch_size": None, "collate_fn": trivial_batch_collator}
            self._inside = DataLoader(_Batches(dataset, self.collate_fn, teller), **kwargs)

    def _say_who_is_told(self, listeners: list[Any]) -> None:
        names = ", ".join(type(listener).__name__ for listener in listeners)
        logger.info("set_epoch(epoch) is called in each process that loads samples: %s", names)
        stays = self.persistent_workers or isinstance(self.sampler, InfiniteSampler)
        if not self._order.source and not self._is_stream and self.num_workers and stays:
            text = "With batch_size=None and workers that stay, the epoch does not reach %s; give a batch size"
            logger.warning(text, names)

    @property
    def epoch_listeners(self) -> list[Any]:
        """What a trainer tells the epoch before each pass, see `trainkit.data.epochs.epoch_listeners`.

        These are the sampler and the batch sampler, as far as they have ``set_epoch``; and this loader, if its dataset
        has it and the sampler is not endless.
        """
        in_dataset = listeners_in(self.dataset)
        found: list[Any] = []
        if self._order.source is None and not self._is_stream:
            found.extend(in_dataset)  # batch_size=None: this loader is as torch's
        elif self._order.tells_epochs and self._order.endless is None:
            found.append(self)
        if not self._is_stream:
            samplers = self.sampler if self.batch_sampler is None else self.batch_sampler
            # a sampler may hold the dataset, which is not told from here
            found.extend(listeners_in(samplers, except_for=[self.dataset, *in_dataset]))
        return found

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the passes that start from now on; without effect on an endless sampler, which knows its own."""
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
            share = smallest_share + (worker < num_larger)
            num_batches += share // self.batch_size
            if share % self.batch_size and not self.drop_last:
                num_batches += 1
        return num_batches

    def _find_obstacle(self) -> str:
        source = self._order.source
        if not self.in_order or source is None:
            return "with in_order=False or batch_size=None the delivered samples are not counted"
        if isinstance(self.dataset, data.IterableDataset):
            return f"a {type(self.dataset).__name__} has no indices; add them, or use a loader that has a state_dict()"
        if not hasattr(source, "state_dict") or not hasattr(source, "load_state_dict"):
            return f"{type(source).__name__} has no state_dict() and load_state_dict()"
        return getattr(source, "resume_obstacle", "")

    seed = property(
        attrgetter("_order.seed"), doc="The seed of samples: the sampler's own seed if it has one."
    )

    def state_dict(self) -> dict[str, Any]:
        """The position of the newest iterator after the delivered batches, if there is no obstacle."""
        return {"kind": type(self._order.source).__name__, "seed": self.seed, **self._order.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next ``iter()`` continues at the saved position, with its seeds; do not use older iterators any more.

        If the state is from a sampler of another class, the data starts again, with a warning.
        """
        if state["kind"] == (kind := type(self._order.source).__name__):
            self._order.load(state)
        else:
            text = "The checkpoint's data order is from %s, which cannot be used with %s; the data starts again"
            logger.warning(text, state["kind"], kind)

    def names_of_last(self, num_batches: int) -> list[list[str]]:
        """The sample names of the last delivered batches, as in errors; fewer batches if they are not known."""
        return [
            [_name(self.dataset, index) for index in batch]
            for batch in [*self._recent][-num_batches:]
        ]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        progress = None
        if self._is_stream:
            self._stream_epoch.fill_(self._order.epoch)
        elif self._inside is not None:
            progress = self._order.start_pass()
        context: Any = self.multiprocessing_context or multiprocessing
        with (
            _stop_signals_blocked(context.get_start_method()) if self.num_workers else nullcontext()
        ):
            fetched = super().__iter__() if self._inside is None else iter(self._inside)
        return fetched if progress is None else _Deliveries(progress, fetched, self._recent)


class _Deliveries(Iterator[Any]):
    """The batches from torch's iterator; counts them."""

    def __init__(
        self, progress: "_Progress", fetched: Iterator[Any], recent: deque[list[Any]]
    ) -> None:
        self._progress, self._fetched, self._recent = progress, fetched, recent
        # If Python collects a cycle of objects, such as a trainer and its hooks, it closes the queues in it first, and
        # torch then waits 5 s for each worker. Held here, torch's iterator is in no cycle.
        weakref.finalize(self, id, fetched).atexit = False

    def __next__(self) -> Any:
        delivered, batch = next(self._fetched)
        self._progress.position, self._progress.num_batches, indices = delivered
        self._recent.append(indices)
        return batch


@dataclass
class _Progress:
    """What a pass has delivered: samples of the stream, counted from the start of the run, and batches.

    ``epoch`` is what a dataset is told, if the sampler does not know the epoch.
    """

    position: int = 0
    num_batches: int = 0
    epoch: int = _NOT_TOLD


class _Order(data.Sampler[Any]):
    """The batches of a loader as (random bits, epochs, (position and number of batches after it, its indices)).

    There are bits for each sample, or for none, and epochs likewise. ``source`` decides the order of samples, so it has
    the state.
    """

    seeds_samples = False
    tells_epochs = False
    epoch = _NOT_TOLD  # of the next pass, if the sampler does not know it

    def __init__(self, batches: Any, seed: int) -> None:
        sampler: Any = getattr(batches, "sampler", None)
        self._batches, self._own_seed = batches, seed
        self.rank, self.world_size = comm.get_data_rank(), comm.get_data_world_size()
        self.source: Any = sampler if type(batches) is data.BatchSampler else batches
        self.is_test = isinstance(sampler, InferenceSampler)
        self.endless: Any = sampler if isinstance(sampler, InfiniteSampler) else None
        self._start: Any = None  # the state of the source before the pass
        self._progress: _Progress | None = None
        self._is_loaded = False

    @property
    def seed(self) -> int:
        return self._own_seed if self.endless is None else self.endless.seed

    def state(self) -> dict[str, Any]:
        progress = self._progress or self.start_pass()
        if self.source is self.endless:
            return {
                "position": progress.position,
                "order": self.source.state_dict(progress.position),
            }
        return {
            "position": progress.position,
            "order": self._start,
            "batches": progress.num_batches,
            "epoch": progress.epoch,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        progress = _Progress(
            check_period("position", state["position"]),
            check_period("batches", state.get("batches", 0)),
            check_period("epoch", state.get("epoch", _NOT_TOLD), minimum=_NOT_TOLD),
        )
        self._own_seed = check_period("seed", state["seed"])
        self.source.load_state_dict(copy.deepcopy(state["order"]))
        self._start = state["order"]
        self._is_loaded = True
        self._progress = progress

    def start_pass(self) -> _Progress:
        """Start a pass: after loading a state where it says, else where the source goes on."""
        if self.endless is not None and self.source is self.endless:
            self._progress = _Progress(self.endless.start)
        elif self._progress is None or not self._is_loaded:
            position = self._progress.position if self._progress else 0
            self._progress = _Progress(position, epoch=self.epoch)
            self._start = (
                copy.deepcopy(self.source.state_dict())
                if hasattr(self.source, "state_dict")
                else None
            )
        self._is_loaded = False
        return self._progress

    def __iter__(self) -> Iterator[Any]:
        progress = self._progress or self.start_pass()
        position = 0 if self.is_test else progress.position
        return self._draw(position, progress.num_batches, progress.epoch)

    def _draw(self, position: int, num_batches: int, epoch: int) -> Iterator[Any]:
        of_ranks, key = self.endless or self, splitmix64(self.seed, 0)
        locate = None
        if self.endless is not None and self.tells_epochs:
            # of a copy: a sampler may remember where it has looked last, and the position that is saved is behind
            locate = copy.copy(self.endless).locate
        for number, drawn in enumerate(islice(self._batches, num_batches, None), num_batches + 1):
            indices = [*drawn]
            places = [
                position + of_ranks.rank + i * of_ranks.world_size for i in range(len(indices))
            ]
            bits = [splitmix64(key, place) for place in places if self.seeds_samples]
            epochs = []
            if locate is not None:
                epochs = [locate(place)[0] for place in places]
            elif self.tells_epochs and epoch != _NOT_TOLD:
                epochs = [epoch] * len(indices)
            position += len(indices) * of_ranks.world_size
            yield bits, epochs, (position, number, indices)


class _Batches(data.Dataset[Any]):
    """The batches by what `_Order` draws, each with its progress; the bits seed the global generators."""

    def __init__(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Any], teller: EpochTeller
    ) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn
        self._teller = teller

    def __getitem__(self, drawn: Any) -> tuple[Any, Any]:
        bits, epochs, delivered = drawn
        indices = delivered[-1]
        samples: list[Any] = []
        is_worker = get_worker_info() is not None
        with nullcontext() if is_worker or not bits else undisturbed_globals():
            try:
                for number, epoch, index in zip_longest(bits, epochs, indices):
                    if epoch is not None:
                        self._teller.tell(epoch)
                    if number is not None:
                        seed_globals(number)
                    samples.append(self.dataset[index])
                return delivered, self._collate_fn(samples)
            except Exception as error:  # a StopIteration would end the data; torch waits for what cannot be pickled
                names = ", ".join(
                    _name(self.dataset, failed) for failed in indices[len(samples) :][:1] or indices
                )
                doing = "loading" if len(samples) < len(indices) else "collating"
                raise RuntimeError(
                    f"{type(error).__qualname__} while {doing} {names}: {error}"
                ) from error


class _Stream(data.IterableDataset[Any]):
    """A stream that is told ``epoch``, a number in shared memory, at the start of each pass."""

    def __init__(self, dataset: Any, epoch: torch.Tensor, teller: EpochTeller) -> None:
        self.dataset = dataset
        self._epoch = epoch
        self._teller = teller

    def __iter__(self) -> Iterator[Any]:
        epoch = int(self._epoch)
        if epoch != _NOT_TOLD:
            self._teller.tell(epoch)
        return iter(self.dataset)


def _may_draw(dataset: Any, collate_fn: Any) -> bool:
    """Whether loading a batch may draw from the global generators; False only for types that are known not to."""
    if collate_fn not in (default_collate, trivial_batch_collator):
        return True
    if type(dataset) is data.Subset:
        return _may_draw(dataset.dataset, collate_fn)
    if type(dataset) is data.ConcatDataset:
        return any(_may_draw(part, collate_fn) for part in dataset.datasets)
    if type(dataset) is DatasetFromList:
        return not dataset.holds_plain_samples
    return type(dataset) not in _NOT_RANDOM


def _name(dataset: Any, index: Any) -> str:
    """The name of a sample; a dataset may have a method ``sample_name(index)`` for it."""
    while type(dataset) is MapDataset:
        dataset = dataset._dataset
    named = getattr(dataset, "sample_name", f"sample {{}} of {type(dataset).__name__}".format)
    return str(named(index))


def worker_init_reset_seed(worker_id: int) -> None:
    """Seed Python, NumPy and torch in a loader worker, and make it ignore signals except a SIGTERM from its parent.

    A terminal, a scheduler and torchrun send signals to all processes, but a run that is stopped still needs batches
    for its last step. Any ``DataLoader`` with forked workers can have this as ``worker_init_fn``; others have
    threads of imports, which a signal may end.
    """
    seed_all_rng((torch.initial_seed() + worker_id) % 2**32)
    if get_worker_info() is not None and (signals := _signals_with_sender()):
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _signals_with_sender() -> set[signal.Signals]:
    """`stop_signals`, if a thread that waits for one can ask who has sent it; on macOS it cannot."""
    return stop_signals() if hasattr(signal, "sigtimedwait") else set()


@contextmanager
def _stop_signals_blocked(start_method: str) -> Iterator[None]:
    """Context in which workers are started, so that all their threads block `_signals_with_sender`."""
    signals = _signals_with_sender()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        if start_method != "fork":
            resource_tracker.ensure_running()  # now, since before Python 3.13 its start unblocks signals
            signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _end_with_parent(born_to: int) -> None:
    """End this worker if its parent sends SIGTERM or has died."""
    parent: Any = multiprocessing.parent_process()
    # with fork, other workers keep open what tells that the parent is alive; with forkserver, `born_to` is the server
    while parent.is_alive() and (os.getppid() == born_to or born_to != parent.pid):
        received = signal.sigtimedwait({signal.SIGTERM}, _POLL_SEC)
        if received is not None and received.si_pid == parent.pid:
            break
    os._exit(0)


def _start_worker(user_function: Callable[[int], None] | None, worker_id: int) -> None:
    worker_init_reset_seed(worker_id)
    worker: Any = get_worker_info()
    if isinstance(worker.dataset, _Batches | _Stream):
        # the user's code expects its own dataset there
        object.__setattr__(worker, "dataset", worker.dataset.dataset)
    if user_function is not None:
        user_function(worker_id)
