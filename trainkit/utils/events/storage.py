"""The storage for values that the loop, the model and the hooks put in each iteration."""

import logging
import operator
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from trainkit.utils.events.history import HistoryBuffer

logger = logging.getLogger(__name__)

_stack: list["EventStorage"] = []
_thread = threading.local()  # .stack: like _stack, for the worker thread of a storage

_MAX_CALLS = 1000  # hand over after this number, also without a loop: memory must stay bounded
_MOST_ITERS = 10  # hand over after this number of iterations; handing over in each one costs more than storing
_MAX_IMAGES = 100  # limit for a rank without a writer, which would clear them


def get_event_storage() -> "EventStorage":
    """The innermost storage whose ``with`` block is open.

    Raises:
        RuntimeError: no storage is open; code that also runs outside training checks ``has_event_storage()`` first.
    """
    stack = _open_storages()
    if not stack:
        raise RuntimeError(
            "no EventStorage is open: put scalars from inside a trainer or a `with EventStorage():` block, "
            "or ask has_event_storage() first"
        )
    return stack[-1]


def has_event_storage() -> bool:
    """Whether a storage is open."""
    return bool(_open_storages())


def _open_storages() -> "list[EventStorage]":
    return getattr(_thread, "stack", None) or _stack


class Image(NamedTuple):
    name: str
    tensor: torch.Tensor
    iter: int


class Histogram(NamedTuple):
    name: str
    iter: int
    raw: dict[str, Any]  # the keyword arguments of SummaryWriter.add_histogram_raw


class EventStorage:
    """Scalars with their history, and the newest images and histograms.

    Writers read it; ``get_event_storage()`` finds it inside ``with storage:``. Each history keeps ``history_length``
    values (see `HistoryBuffer`).

    Values are stored at once. After ``start_deferring`` they wait in a list; ``publish``, and the loop every 10
    iterations, hand the list to a worker thread, which stores it in the same order. Reads wait for the worker. Read
    again for new values: results may be copies.
    """

    def __init__(self, start_iter: int = 0, history_length: int = 10_000) -> None:
        self._place = start_iter, ""  # current iteration and name scope
        self._history_length = history_length
        self._history: dict[str, HistoryBuffer] = {}
        self._smoothing_hints: dict[str, bool] = {}
        self._epochs: dict[str, int] = {}
        self._images: deque[Image] = deque(maxlen=_MAX_IMAGES)
        self._histograms: deque[Histogram] = deque(maxlen=_MAX_IMAGES)
        self._holds_images = False
        # only used after start_deferring
        self._pool: ThreadPoolExecutor | None = None
        self._worker: int | None = None  # id of the worker's thread
        self._process = 0  # id of the process that has this thread
        self._late_place = self._place  # iteration and name scope of the call that the worker makes
        self._calls: deque[tuple[tuple[int, str], Callable[..., None], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()  # for reads from another thread; appending needs no lock
        self._job: Future[None] = Future()  # the last job
        self._job.set_result(None)
        self._before = -1, self._job  # at the last catch_up: iteration and last job
        self._errors: list[BaseException] = []  # at most one: the worker's first error since the last raise

    # ------------------------------------------------------------------ put

    def put_scalar(
        self,
        name: str,
        value: float,
        smoothing_hint: bool = True,
        cur_iter: int | None = None,
        *,
        epoch: int | None = None,
    ) -> None:
        """Store one number; writers show its median over a window if ``smoothing_hint``, else the number itself.

        Args:
            epoch: writers show the scalar over epochs, at this epoch.

        Raises:
            ValueError: the name has the other hint already; it is ``iteration``, or ``epoch`` while the argument
                ``epoch`` is given (writers use these names); the value is not one number.
            TypeError: the name is not text.
        """
        self.put_row({name: value}, smoothing_hint, cur_iter, epoch=epoch)

    def put_scalars(self, *, smoothing_hint: bool = True, cur_iter: int | None = None, **kwargs: float) -> None:
        """``put_scalar`` for each keyword."""
        self.put_row(kwargs, smoothing_hint, cur_iter)

    def put_row(
        self,
        values: Mapping[str, float],
        smoothing_hint: bool = True,
        cur_iter: int | None = None,
        *,
        epoch: int | None = None,
    ) -> None:
        """``put_scalar`` for each item, with any names."""
        iter, prefix = self._place if self._pool is None else self._present_place()
        if cur_iter is not None:
            iter = operator.index(cur_iter)
        if epoch is not None:
            epoch = operator.index(epoch)
            if not prefix and "epoch" in values:
                raise ValueError("a scalar called 'epoch' cannot have an epoch itself; give it another name")
        row, hints = {}, self._smoothing_hints
        for name, value in values.items():
            if prefix or hints.get(name) is not smoothing_hint:  # False: accepted before
                name = self._accepted(prefix, name, smoothing_hint)
            try:
                row[name] = float(value)
            except (TypeError, ValueError) as error:
                kind = type(value).__name__
                raise ValueError(
                    f"scalar {name!r} must be one number or a tensor of one element, got {kind}: {error}"
                ) from error
        if not row.keys() <= hints.keys():  # not earlier, so that a refused row changes nothing
            hints.update(dict.fromkeys(row, smoothing_hint))
        if self._pool is None:
            self._store_row(row, iter, epoch)
        else:
            self._put(self._store_row, row, iter, epoch)

    def _accepted(self, prefix: str, name: str, smoothing_hint: bool) -> str:
        name = _writable(prefix, name)
        if name == "iteration":
            raise ValueError("'iteration' is the name under which writers show the iteration; use another name")
        if self._smoothing_hints.get(name, smoothing_hint) is not smoothing_hint:
            raise ValueError(
                f"scalar {name!r} was put with smoothing_hint={not smoothing_hint} before and now with "
                f"smoothing_hint={smoothing_hint}; use one hint per name"
            )
        return name

    def _store_row(self, row: Mapping[str, float], iter: int, epoch: int | None) -> None:
        for name, value in row.items():
            history = self._history.get(name)
            if history is None:
                history = HistoryBuffer(self._history_length)
            history.update(value, iter)
            self._history[name] = history  # only after it has a value, since another thread may read it
        if epoch is not None:
            self._epochs.update(dict.fromkeys(row, epoch))
        elif self._epochs:
            for name in row:
                self._epochs.pop(name, None)

    def put_image(self, img_name: str, img_tensor: torch.Tensor) -> None:
        """Keep an image for the writers: shape ``[channel, height, width]``, RGB, float in [0, 1] or uint8.

        The newest 100 are kept until a writer that shows images clears them.
        """
        iter, prefix = self._present_place()
        self._put(self._images.append, Image(_writable(prefix, img_name), img_tensor, iter))

    def put_histogram(self, hist_name: str, hist_tensor: torch.Tensor, bins: int = 1000) -> None:
        """Keep the histogram of a tensor of any shape, like an image. Synchronizes its device."""
        values = hist_tensor.detach().float().flatten().cpu()
        low, high = values.min().item(), values.max().item()
        raw = {
            "min": low,
            "max": high,
            "num": values.numel(),
            "sum": values.sum().item(),
            "sum_squares": values.square().sum().item(),
            "bucket_limits": torch.linspace(low, high, bins + 1)[1:].tolist(),
            "bucket_counts": torch.histc(values, bins=bins).tolist(),
        }
        iter, prefix = self._present_place()
        self._put(self._histograms.append, Histogram(_writable(prefix, hist_name), iter, raw))

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Context in which names get the prefix ``name/``."""
        iter, before = self._present_place()
        self._go_to(iter, name.rstrip("/") + "/")
        try:
            yield
        finally:
            self._go_to(self.iter, before)

    def _put(self, store: Callable[..., None], *args: Any) -> None:
        """Store the values now, or in the worker after everything that was put before."""
        if self._pool is None or self._is_worker():
            store(*args)
            return
        self._calls.append((self._place, store, args))
        if len(self._calls) >= _MAX_CALLS:
            self.hand_over()

    def _is_worker(self) -> bool:
        return self._pool is not None and threading.get_ident() == self._worker

    def _present_place(self) -> tuple[int, str]:
        return self._late_place if self._is_worker() else self._place

    def _go_to(self, iter: int, prefix: str) -> None:
        if self._is_worker():
            self._late_place = iter, prefix
        else:
            self._place = iter, prefix

    # ------------------------------------------------------------------ read

    def history(self, name: str) -> HistoryBuffer:
        """The history of a scalar. Raises KeyError if nothing was put under this name."""
        self.flush()
        name = _writable("", name)
        if name not in self._history:
            raise KeyError(f"no scalar is called {name!r}; there are {sorted(self._history)}")
        return self._history[name]

    def histories(self) -> dict[str, HistoryBuffer]:
        self.flush()
        return self._history

    def latest(self) -> dict[str, tuple[float, int]]:
        """name -> (newest value, its iteration)."""
        self.flush()
        return {name: history.latest_with_iter() for name, history in [*self._history.items()]}

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, tuple[float, int]]:
        """Like ``latest``; for a smoothed scalar, its median over the last ``window_size`` iterations."""
        self.flush()
        smoothed = {}
        for name, history in [*self._history.items()]:  # another thread may add to it
            value, iter = history.latest_with_iter()
            if self._smoothing_hints[name]:
                value = history.median(history.count_within(window_size))
            smoothed[name] = value, iter
        return smoothed

    def count_samples(self, name: str, window_size: int = 20) -> int:
        """The number of values in the last ``window_size`` iterations, which end with that of the newest value."""
        return self.history(name).count_within(window_size)

    def smoothing_hints(self) -> dict[str, bool]:
        self.flush()
        return self._smoothing_hints

    def epochs(self) -> dict[str, int]:
        """name -> epoch of the newest value, if it has one."""
        self.flush()
        return self._epochs

    def images(self) -> list[Image]:
        self.flush()
        return [Image(*image) for image in self._images]

    @property
    def _vis_data(self) -> deque[Image]:
        """``images()`` under detectron2's name, not a copy."""
        self.flush()
        return self._images

    def histograms(self) -> list[Histogram]:
        self.flush()
        return list(self._histograms)

    def clear_images(self) -> None:
        self._put(self._clear, self._images)

    def clear_histograms(self) -> None:
        self._put(self._clear, self._histograms)

    @contextmanager
    def hold_images(self) -> Iterator[None]:
        """Context in which clearing has no effect, so that several writers see the images and histograms."""
        self._holds_images = True
        try:
            yield
        finally:
            self._holds_images = False

    def _clear(self, items: deque[Any]) -> None:
        if not self._holds_images:
            items.clear()

    # ------------------------------------------------------------------ iteration

    @property
    def iter(self) -> int:
        """The current iteration, counted from 0."""
        return self._present_place()[0]

    @iter.setter
    def iter(self, value: int) -> None:
        self._go_to(int(value), self._present_place()[1])

    iteration = iter

    def step(self) -> None:
        """Go to the next iteration; for a loop without a trainer (a trainer sets ``iter``)."""
        self.iter += 1

    def begin_iter(self, iter: int) -> None:
        """Set the iteration; if an iteration before ``iter - 19`` made the worker fail, its error is raised now."""
        self._place = iter, self._place[1]
        if self._pool is not None and iter - self._before[0] >= _MOST_ITERS:
            self.hand_over()
            self.catch_up()
        self.raise_error()

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything stored; not ``iter``, which belongs to the loop."""
        self.flush()
        return {
            "histories": {name: history.state_dict() for name, history in self._history.items()},
            "smoothing_hints": dict(self._smoothing_hints),
            "epochs": dict(self._epochs),
            "images": [{**image._asdict(), "tensor": _plain(image.tensor)} for image in self.images()],
            "histograms": [histogram._asdict() for histogram in self._histograms],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the content by that of ``state``; ``history_length`` stays."""
        self.flush()
        self._history = {}
        for name, saved in state["histories"].items():
            self._history[name] = HistoryBuffer(self._history_length)
            self._history[name].load_state_dict(saved)
        self._smoothing_hints, self._epochs = dict(state["smoothing_hints"]), dict(state["epochs"])
        self._images = deque((Image(**image) for image in state["images"]), _MAX_IMAGES)
        self._histograms = deque((Histogram(**histogram) for histogram in state["histograms"]), _MAX_IMAGES)

    # ------------------------------------------------------------------ storing later

    def start_deferring(self) -> None:
        """Let a worker thread store values from now on, until the ``with`` block ends."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "trainkit-metrics", initializer=self._start_worker)
            self._before, self._process = (self.iter, self._job), os.getpid()

    def _start_worker(self) -> None:
        self._worker, _thread.stack = threading.get_ident(), [self]

    def put_later(self, store: Callable[..., None], *args: Any) -> None:
        """Call ``store(*args)`` after everything put before: at once, or in the worker, which may wait for a device.

        Values that it puts belong to the current iteration and name scope.
        """
        self._put(self._call, store, args)

    def _call(self, store: Callable[..., None], args: tuple[Any, ...]) -> None:
        stack = _open_storages()
        stack.append(self)  # another storage may be open now, for an evaluation
        try:
            store(*args)
        finally:
            stack.pop()

    def publish(self, write: Callable[[], None]) -> None:
        """Call ``write()`` after everything that was put so far: at once, or in the worker, without waiting."""
        self.put_later(write)
        self.hand_over()

    def catch_up(self) -> None:
        """Wait for the jobs of the last call in an earlier iteration; ``raise_error`` then raises their errors."""
        iter, job = self._before
        if iter != self.iter:
            job.result()
            self._before = self.iter, self._job

    def hand_over(self) -> None:
        """Let the worker start with everything that was put so far; does not wait."""
        if self._pool is None or not self._may_wait():
            return
        with self._lock:
            calls = [self._calls.popleft() for _ in range(len(self._calls))]
            if calls:
                self._job = self._pool.submit(self._make, calls)

    def _make(self, calls: list[tuple[tuple[int, str], Callable[..., None], tuple[Any, ...]]]) -> None:
        """Make the calls, in the worker; an error does not prevent later calls."""
        for self._late_place, call, args in calls:
            try:
                call(*args)
            except BaseException as error:
                if not self._errors:
                    self._errors.append(error)

    def raise_error(self) -> None:
        """Raise the first error of the worker since the last call; does not wait."""
        if self._errors:
            raise self._errors.pop()

    def _may_wait(self) -> bool:
        """Whether there is a worker, and this is another thread. A forked process, as of a loader, has no worker."""
        return self._pool is not None and not self._is_worker() and os.getpid() == self._process

    def flush(self) -> None:
        """Wait until everything that was put so far is stored; raise the first error of the worker."""
        if self._may_wait():
            self.hand_over()
            self._job.result()  # waits for everything before an error is raised, since a writer may be closed next
            self.raise_error()

    # ------------------------------------------------------------------ context

    def __enter__(self) -> "EventStorage":
        _open_storages().append(self)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        _open_storages().remove(self)
        try:
            self.flush()
        except Exception:
            if error is None:
                raise
            logger.exception("Storing or writing metrics failed as well:")
        finally:
            if self._pool is not None:
                self._pool.shutdown()
            self._pool = self._worker = None


def _writable(prefix: str, name: str) -> str:
    """The full name; a lone surrogate, which no file accepts, is escaped: ``"\\ud800"``."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a scalar or an image must be text, got {name!r}; use str(name)")
    whole = prefix + name
    return whole if whole.isascii() else whole.encode("utf-8", "backslashreplace").decode()


def _plain(image: Any) -> torch.Tensor:
    """A plain tensor on the CPU: users also put arrays and tensor subclasses, which a checkpoint refuses."""
    return torch.as_tensor(image).detach().cpu().as_subclass(torch.Tensor)
