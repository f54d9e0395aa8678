"""The storage for values that the loop, the model and the hooks put in each iteration."""

import copy
import logging
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from trainkit.utils.device import runs_ahead
from trainkit.utils.events.history import HistoryBuffer
from trainkit.utils.events.images import Histogram, Image, histogram_of, showable_image
from trainkit.utils.events.numbers import Numbers
from trainkit.utils.events.worker import Worker
from trainkit.utils.numbers import one_number

logger = logging.getLogger(__name__)


class _OfThread(threading.local):
    """The storages that a thread has opened, the innermost one last."""

    def __init__(self) -> None:
        self.opened: list[EventStorage] = []
        # in the thread of a `Worker`: other threads do not see what it opens
        self.is_worker = False


_thread = _OfThread()
# of each thread that has opened one; the key is the `id` of its list ``opened``
_innermost: dict[int, "EventStorage"] = {}

MAX_ROWS = 1000  # this number of rows waits at most before they are stored
_MAX_IMAGES = 100  # of images, and of histograms; for a rank without a writer that clears them


def get_event_storage() -> "EventStorage":
    """The innermost storage whose ``with`` block is open in this thread.

    A thread that has opened none (of autograd, of a loader) gets that of the thread that has.

    Raises:
        RuntimeError: no storage is open, see ``has_event_storage()``; or this thread has opened
            none, and several others have.
    """
    if _thread.opened:
        return _thread.opened[-1]
    elsewhere = _opened_elsewhere()
    if not elsewhere:
        raise RuntimeError(
            "no EventStorage is open; open one (`with EventStorage():`), or ask has_event_storage()"
        )
    if len(elsewhere) > 1:
        here = threading.current_thread().name
        raise RuntimeError(
            f"thread {here!r} has opened no EventStorage, and {len(elsewhere)} are open in other "
            "threads; open that of the run here: `with trainer.storage:`"
        )
    return elsewhere[0]


def has_event_storage() -> bool:
    """Whether a storage is open, in this thread or in another one."""
    return bool(_thread.opened or _innermost)


def storage_of_thread() -> "EventStorage | None":
    """The innermost storage that this thread has opened."""
    return _thread.opened[-1] if _thread.opened else None


def _opened_elsewhere() -> list["EventStorage"]:
    """The innermost storages of other threads, each once."""
    storages: list[EventStorage] = []
    for storage in list(_innermost.values()):
        if storage not in storages:
            storages.append(storage)
    return storages


def other_threads_have_storages() -> bool:
    """Whether another thread has opened a storage: it probably trains too."""
    this_thread = id(_thread.opened)
    return any(thread != this_thread for thread in list(_innermost))


def _mark_as_worker() -> None:
    """Called in the thread of a `Worker`."""
    _thread.is_worker = True


class EventStorage:
    """Scalars with their history, and the newest images and histograms.

    Writers read it; ``get_event_storage()`` finds it inside ``with storage:``, in the thread that
    has opened it. Each history keeps ``history_length`` values (see `HistoryBuffer`). A put is one
    append to a list, ``rows``. The first read moves them into the histories.

    Attributes:
        iter: the current iteration, counted from 0; the loop sets it.
        rows: (iter, name -> value), in the order of the puts; they wait here to be stored. A
            tensor, of shape ``[]``, is read then, with all others.
        before_read: called with this storage before a read stores what waits; the trainer adds the
            rows that it still holds.
        worker: stores and writes in a thread, after `start_worker`.
    """

    iter: int = 0

    def __init__(self, start_iter: int = 0, history_length: int = 10_000) -> None:
        self.iter = start_iter
        self.rows: list[tuple[int, Mapping[str, Any]]] = []
        self.before_read: Callable[[EventStorage], None] | None = None
        self.worker: Worker | None = None
        self._prefix = ""
        self._history_length = history_length
        self._history: dict[str, HistoryBuffer] = {}
        self._smoothing_hints: dict[str, bool] = {}
        self._images: deque[Image] = deque(maxlen=_MAX_IMAGES)
        self._histograms: deque[Histogram] = deque(maxlen=_MAX_IMAGES)
        self._holds_images = False
        self._warned: set[str] = set()
        self._num_open = 0
        # the values of ``rows``, if their copy to the CPU has started already
        self._numbers: Numbers | None = None

    # ------------------------------------------------------------------ put

    def put_scalar(
        self,
        name: str,
        value: float | Tensor,
        smoothing_hint: bool = True,
        cur_iter: int | None = None,
    ) -> None:
        """Store one number.

        An array or a tensor with one element is a number too. A tensor on an accelerator is copied
        there and read later, so the caller does not wait.

        Args:
            smoothing_hint: writers show the median over a window. False: the number itself.
            cur_iter: default: ``iter``.

        Raises:
            ValueError: the name has the other hint already; writers use the name themselves; the
                value is not one number.
        """
        number: Any = value
        if type(value) is not float:
            number = _readable(name, value)
        if self._prefix or self._smoothing_hints.get(name) is not smoothing_hint:
            name = self._register_name(name, smoothing_hint)
        iteration = self.iter if cur_iter is None else operator.index(cur_iter)
        self._put_row(iteration, {name: number})

    def put_scalars(
        self, *, smoothing_hint: bool = True, cur_iter: int | None = None, **kwargs: float
    ) -> None:
        """``put_scalar`` for each keyword, together."""
        row = {}
        for name, value in kwargs.items():
            number = value if type(value) is float else _readable(name, value)
            if self._prefix or self._smoothing_hints.get(name) is not smoothing_hint:
                name = self._register_name(name, smoothing_hint)
            row[name] = number
        if row:
            iteration = self.iter if cur_iter is None else operator.index(cur_iter)
            self._put_row(iteration, row)

    def _put_row(self, iteration: int, row: Mapping[str, Any]) -> None:
        self.rows.append((iteration, row))
        if len(self.rows) >= MAX_ROWS:
            self.hand_over()

    def _register_name(self, name: str, smoothing_hint: bool) -> str:
        """Note the hint of a scalar; returns its name with the prefix."""
        name = self._prefix + name
        if name == "iteration":
            raise ValueError(f"{name!r} is a name that writers use themselves; use another name")
        first_hint = self._smoothing_hints.setdefault(name, smoothing_hint)
        if first_hint is not smoothing_hint:
            raise ValueError(
                f"scalar {name!r} was put with smoothing_hint={not smoothing_hint}; use one hint "
                "per name"
            )
        return name

    def put_image(self, img_name: str, img_tensor: Tensor) -> None:
        """Keep an image for the writers.

        The newest 100 are kept until a writer that shows images clears them. NaN is shown as 0.

        Args:
            img_tensor: shape ``[channel, height, width]``, RGB, float in [0, 1], uint8 or bool.

        Raises:
            ValueError: it has another shape or type, no pixel, or other than 1, 3 or 4 channels.
        """
        name = self._prefix + img_name
        image = showable_image(name, img_tensor, self._warn_once)
        self._images.append(Image(name, image, self.iter))

    def put_histogram(self, hist_name: str, hist_tensor: Tensor, bins: int = 1000) -> None:
        """Keep the histogram of the finite values of a tensor of any shape, like an image.

        Synchronizes its device. If there is no finite value, nothing is kept.

        Raises:
            ValueError: these are no real numbers, or ``bins`` is below 1.
        """
        name = self._prefix + hist_name
        raw = histogram_of(name, hist_tensor, bins, self._warn_once)
        if raw is not None:
            self._histograms.append(Histogram(name, self.iter, raw))

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text)

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Context in which names get the prefix ``name/``."""
        outer_prefix = self._prefix
        self._prefix = name.rstrip("/") + "/"
        try:
            yield
        finally:
            self._prefix = outer_prefix

    # ------------------------------------------------------------------ store what waits

    def start_worker(self) -> Worker:
        """From now on a thread stores what waits, and makes the calls of `publish`.

        The thread ends with the ``with`` block. Raises its first error since the last call.
        """
        if self.worker is None:
            self.worker = Worker(self, _mark_as_worker)
        self.worker.raise_error()
        return self.worker

    def flush(self) -> None:
        """Store everything that was put so far; wait until the worker has done it.

        Raises the worker's first error since the last flush.
        """
        if self.before_read is not None:
            self.before_read(self)
        if self.rows:
            self.hand_over()
        if self.worker is not None:
            self.worker.wait()

    def hand_over(self) -> None:
        """Store ``rows``: now, or in the worker, without waiting."""
        if self.worker is None:
            self._store()
        else:
            self.worker.submit(self.split_off())

    def publish(self, call: Callable[[], object]) -> None:
        """Call ``call()``, which may read the storage, after everything so far is stored.

        Without a worker the call is made at once, with this storage as the open one. With a worker
        it is made there, without waiting; the open storage is then a copy that `split_off` makes.
        """
        if self.worker is None:
            with self:
                call()
            return
        if self.before_read is not None:
            self.before_read(self)
        self.worker.submit(self.split_off(with_images=True), call)
        self.worker.collect(leave_newest=2)  # writers that are slower than the run hold it up

    def split_off(self, *, with_images: bool = False) -> "EventStorage":
        """Move ``rows`` into a new storage, which shares the histories of this one, for the worker.

        The copy of their values to the CPU starts now. The images and histograms stay here, or go
        with the rows.
        """
        part = copy.copy(self)
        part.before_read = None
        part.worker = None
        part._num_open = 0
        if self.rows:
            part._numbers = Numbers(_values_of(self.rows))
        else:
            part._numbers = None
        self.rows = []
        storage_without_images = self if with_images else part
        storage_without_images._images = deque(maxlen=_MAX_IMAGES)
        storage_without_images._histograms = deque(maxlen=_MAX_IMAGES)
        return part

    def take_back_images(self, parts: Sequence["EventStorage"]) -> None:
        """Take the images and histograms that nobody has cleared in storages of `split_off`."""
        images: list[Image] = []
        histograms: list[Histogram] = []
        for storage in (*parts, self):
            images.extend(storage._images)
            histograms.extend(storage._histograms)
        images.sort(key=attrgetter("iter"))
        histograms.sort(key=attrgetter("iter"))
        self._images = deque(images, maxlen=_MAX_IMAGES)
        self._histograms = deque(histograms, maxlen=_MAX_IMAGES)

    def _store(self) -> None:
        """Move ``rows`` into the histories."""
        rows = self.rows
        self.rows = []
        numbers = self._numbers
        self._numbers = None
        if numbers is None:
            numbers = Numbers(_values_of(rows))
        columns: dict[str, tuple[list[float], list[int]]] = {}  # values and their iterations
        number = iter(numbers.read())
        for iteration, row in rows:
            for name in row:
                if name not in columns:
                    columns[name] = ([], [])
                values, iterations = columns[name]
                values.append(next(number))
                iterations.append(iteration)
        for name, (values, iterations) in columns.items():
            if name not in self._history:
                self._smoothing_hints.setdefault(name, True)
                self._history[name] = HistoryBuffer(self._history_length)
            self._history[name].extend(values, iterations)

    # ------------------------------------------------------------------ read

    def history(self, name: str) -> HistoryBuffer:
        """The history of a scalar. Raises KeyError if nothing was put under this name."""
        histories = self.histories()
        if name not in histories:
            raise KeyError(f"no scalar is called {name!r}; there are {sorted(histories)}")
        return histories[name]

    def histories(self) -> dict[str, HistoryBuffer]:
        self.flush()
        return self._history

    def latest(self) -> dict[str, tuple[float, int]]:
        """name -> (newest value, its iteration)."""
        return {name: history.latest_with_iter() for name, history in self.histories().items()}

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, tuple[float, int]]:
        """Like ``latest``, but the value of a smoothed scalar is its median.

        That of the finite values in the last ``window_size`` iterations; `counts_left_out` says
        how many others there are.
        """
        smoothed = self.latest()
        for name, (_, iteration) in smoothed.items():
            if self._smoothing_hints[name]:
                median, _ = self._history[name].smooth(window_size)
                smoothed[name] = median, iteration
        return smoothed

    def counts_left_out(self, window_size: int = 20) -> dict[str, int]:
        """name -> number of values that the median leaves out, since they are not finite.

        Only scalars whose median leaves out some. A scalar without any finite value in the window
        is not here: its newest value is shown.
        """
        counts = {}
        for name, history in self.histories().items():
            if not self._smoothing_hints[name]:
                continue
            _, num_left_out = history.smooth(window_size)
            if num_left_out > 0:
                counts[name] = num_left_out
        return counts

    def count_samples(self, name: str, window_size: int = 20) -> int:
        """The number of values in the last ``window_size`` iterations, see `HistoryBuffer`."""
        return self.history(name).count_within(window_size)

    def smoothing_hints(self) -> dict[str, bool]:
        self.flush()
        return self._smoothing_hints

    def images(self) -> list[Image]:
        # code for detectron2 may have put plain tuples into `_vis_data`
        return [Image(*image) for image in self._vis_data]

    @property
    def _vis_data(self) -> deque[Image]:
        """``images()`` under detectron2's name, not a copy."""
        self.flush()
        return self._images

    def histograms(self) -> list[Histogram]:
        self.flush()
        return [*self._histograms]

    def clear_images(self) -> None:
        if not self._holds_images:
            self._images.clear()

    def clear_histograms(self) -> None:
        if not self._holds_images:
            self._histograms.clear()

    @contextmanager
    def hold_images(self) -> Iterator[None]:
        """Context in which clearing has no effect, so that several writers see the images."""
        self._holds_images = True
        try:
            yield
        finally:
            self._holds_images = False

    @property
    def iteration(self) -> int:
        """``iter`` under detectron2's name."""
        return self.iter

    def step(self) -> None:
        """Go to the next iteration; for a loop without a trainer (a trainer sets ``iter``)."""
        self.iter += 1

    # ------------------------------------------------------------------ state, and the open storage

    def state_dict(self) -> dict[str, Any]:
        """Everything stored, without ``iter``, which belongs to the loop.

        Images become plain tensors on the CPU.
        """
        histories = {name: history.state_dict() for name, history in self.histories().items()}
        images = []
        for image in self.images():
            tensor = torch.as_tensor(image.tensor).detach().cpu().as_subclass(Tensor)
            images.append(image._replace(tensor=tensor)._asdict())
        return {
            "histories": histories,
            "smoothing_hints": dict(self._smoothing_hints),
            "images": images,
            "histograms": [histogram._asdict() for histogram in self._histograms],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the content by that of ``state``; ``history_length`` stays."""
        self.flush()
        self._history = {}
        for name, saved in state["histories"].items():
            self._history[name] = HistoryBuffer(self._history_length)
            self._history[name].load_state_dict(saved)
            self._history[name].latest()  # raises an error if it is empty
        self._smoothing_hints = dict(state["smoothing_hints"])
        if self._smoothing_hints.keys() != self._history.keys():
            names = f"{sorted(self._smoothing_hints)}, not those of {sorted(self._history)}"
            raise ValueError(f"smoothing_hints has {names:.200}")
        for name, hint in self._smoothing_hints.items():
            if not isinstance(hint, bool):
                raise TypeError(f"the smoothing hint of {name!r} must be a bool, got {hint!r:.80}")
        self._images = deque(maxlen=_MAX_IMAGES)
        for entry in state["images"]:
            image = Image(**entry)
            if not isinstance(image.tensor, Tensor):
                raise TypeError(
                    f"the tensor of an image must be a tensor, got {image.tensor!r:.80}"
                )
            self._images.append(image._replace(name=str(image.name), iter=int(image.iter)))
        self._histograms = deque(maxlen=_MAX_IMAGES)
        for entry in state["histograms"]:
            name, iter, raw = Histogram(**entry)
            self._histograms.append(Histogram(str(name), int(iter), dict(raw)))

    @property
    def is_open(self) -> bool:
        """Whether a ``with`` block of this storage is open, in any thread."""
        return self._num_open > 0

    def __enter__(self) -> "EventStorage":
        self._num_open += 1
        _thread.opened.append(self)
        _show_innermost()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        opened = _thread.opened
        # `remove` finds the first entry; the innermost one of this storage is the last
        opened.reverse()
        opened.remove(self)
        opened.reverse()
        _show_innermost()
        self._num_open -= 1
        if self.worker is None or self.is_open:
            return
        # the last ``with`` block ends
        try:
            self.flush()
        except Exception:
            if error is None:
                raise
            logger.exception("Storing or writing metrics failed as well:")
        finally:
            self.worker.close()
            self.worker = None


def _show_innermost() -> None:
    """Let other threads see the innermost storage of this one."""
    if _thread.is_worker:
        return
    if _thread.opened:
        _innermost[id(_thread.opened)] = _thread.opened[-1]
    else:
        _innermost.pop(id(_thread.opened), None)


def _readable(name: str, value: Any) -> Any:
    """The value of a scalar as a float, or as a copy on a device that runs ahead, to be read later.

    Raises ValueError if it is not one number.
    """
    try:
        if isinstance(value, Tensor) and runs_ahead(value.device):
            return value.detach().clone().reshape(())
        return one_number(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"scalar {name!r} must be one number, got {type(value).__name__}: {error}"
        ) from error


def _values_of(rows: Sequence[tuple[int, Mapping[str, Any]]]) -> list[Any]:
    values: list[Any] = []
    for _, row in rows:
        values.extend(row.values())
    return values
