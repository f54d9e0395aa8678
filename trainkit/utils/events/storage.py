"""The storage for values that the loop, the model and the hooks put in each iteration."""

import copy
import logging
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.utils.device import runs_ahead
from trainkit.utils.events.history import HistoryBuffer
from trainkit.utils.events.worker import Numbers, Worker
from trainkit.utils.numbers import one_number

logger = logging.getLogger(__name__)


class _OfThread(threading.local):
    """The storages that a thread has opened, the innermost one last."""

    def __init__(self) -> None:
        self.opened: list[EventStorage] = []
        # in the thread of a `Worker`: other threads do not see what it opens
        self.is_worker = False


_thread = _OfThread()
_innermost: dict[int, "EventStorage"] = {}  # of each thread that has opened one; key: its list

MAX_ROWS = 1000  # this number of rows waits at most before they are stored
_MAX_IMAGES = 100  # limit for a rank without a writer, which would clear them


def get_event_storage() -> "EventStorage":
    """The innermost storage whose ``with`` block is open in this thread.

    A thread that has opened none (of autograd, of a loader) gets the innermost one of the thread that has.

    Raises:
        RuntimeError: no storage is open, see ``has_event_storage()``; or several threads have opened one, but not this.
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
            f"thread {here!r} has opened no EventStorage, and {len(elsewhere)} are open in other threads; open that of "
            "the run here: `with trainer.storage:`"
        )
    return elsewhere[0]


def has_event_storage() -> bool:
    """Whether a storage is open, in this thread or in another one."""
    return bool(_thread.opened or _innermost)


def storage_of_thread() -> "EventStorage | None":
    """The innermost storage that this thread has opened."""
    return _thread.opened[-1] if _thread.opened else None


def _opened_elsewhere() -> list["EventStorage"]:
    """The innermost storages of other threads; one that several threads have opened is here once."""
    by_id = {id(storage): storage for storage in list(_innermost.values())}
    return list(by_id.values())


def other_threads_have_storages() -> bool:
    """Whether another thread has opened a storage: it probably trains too."""
    own = id(_thread.opened)
    return any(key != own for key in list(_innermost))


def _mark_worker() -> None:
    _thread.is_worker = True


class Image(NamedTuple):
    name: str
    tensor: Tensor
    iter: int


class Histogram(NamedTuple):
    name: str
    iter: int
    raw: dict[str, Any]  # the keyword arguments of SummaryWriter.add_histogram_raw


class EventStorage:
    """Scalars with their history, and the newest images and histograms.

    Writers read it; ``get_event_storage()`` finds it inside ``with storage:``, in the thread that has opened it. Each
    history keeps ``history_length`` values (see `HistoryBuffer`). A put is one append to a list; whoever reads first
    stores what waits there.

    Attributes:
        iter: the current iteration, counted from 0; the loop sets it.
        rows: (iter, name -> value), in the order of the puts; a tensor, of shape ``[]``, is read later with all others.
        before_read: called before a read stores what waits; the trainer adds what it still holds.
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
        # those of ``rows``, if they are on their way to the host already
        self._numbers: Numbers | None = None

    # ------------------------------------------------------------------ put

    def put_scalar(
        self,
        name: str,
        value: float | Tensor,
        smoothing_hint: bool = True,
        cur_iter: int | None = None,
    ) -> None:
        """Store one number; writers show its median over a window if ``smoothing_hint``, else the number itself.

        An array or a tensor with one element is a number too. A tensor on an accelerator is copied there and read
        later, so the caller does not wait.

        Raises:
            ValueError: the name has the other hint already; writers use it; the value is not one number.
        """
        try:
            if isinstance(value, Tensor) and runs_ahead(value.device):
                number: Any = value.detach().clone().reshape(())
            else:
                number = one_number(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"scalar {name!r} must be one number, got {type(value).__name__}: {error}"
            ) from error
        if self._prefix or self._smoothing_hints.get(name) is not smoothing_hint:
            name = self._accepted(name, smoothing_hint)
        self.rows.append(
            (self.iter if cur_iter is None else operator.index(cur_iter), {name: number})
        )
        if len(self.rows) >= MAX_ROWS:
            self.hand_over()

    def put_scalars(
        self, *, smoothing_hint: bool = True, cur_iter: int | None = None, **kwargs: float
    ) -> None:
        """``put_scalar`` for each keyword."""
        for name, value in kwargs.items():
            self.put_scalar(name, value, smoothing_hint, cur_iter)

    def _accepted(self, name: str, smoothing_hint: bool) -> str:
        """The full name, with its hint noted."""
        name = self._prefix + name
        if name == "iteration":
            raise ValueError(f"{name!r} is a name that writers use themselves; use another name")
        if self._smoothing_hints.setdefault(name, smoothing_hint) is not smoothing_hint:
            raise ValueError(
                f"scalar {name!r} was put with smoothing_hint={not smoothing_hint}; use one hint per name"
            )
        return name

    def put_image(self, img_name: str, img_tensor: Tensor) -> None:
        """Keep an image for the writers: shape ``[channel, height, width]``, RGB, float in [0, 1] or uint8.

        The newest 100 are kept until a writer that shows images clears them. NaN is shown as 0; so is a mask's False.

        Raises:
            ValueError: it has another shape or type, no pixel, or other than 1, 3 or 4 channels.
        """
        name = self._prefix + img_name
        self._images.append(Image(name, self._showable(name, img_tensor), self.iter))

    def _showable(self, name: str, image: Any) -> Any:
        """The image, or a copy that every writer can show."""
        try:
            tensor = torch.as_tensor(image)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"image {name!r} must be a tensor or an array, got {type(image).__name__}: {error}"
            ) from error
        if tensor.ndim != 3 or tensor.shape[0] not in (1, 3, 4) or tensor.numel() == 0:
            raise ValueError(
                f"image {name!r} has the shape {list(tensor.shape)}; accepted: [channel, height, width] with 1, 3 or "
                "4 channels, see permute() and unsqueeze()"
            )
        if tensor.dtype == torch.uint8:
            return image
        if tensor.dtype == torch.bool:
            return tensor.detach().float()
        if not tensor.is_floating_point():
            raise ValueError(
                f"image {name!r} has the type {tensor.dtype}; accepted: float in [0, 1], uint8 in [0, 255], bool"
            )
        if tensor.dtype not in (torch.float32, torch.float64):
            tensor = image = tensor.detach().float()  # NumPy has no bfloat16
        if runs_ahead(tensor.device):  # to look would wait for the device
            return tensor.detach().nan_to_num(nan=0.0, posinf=1.0, neginf=0.0)
        if tensor.isfinite().all():
            return image
        self._warn_once(
            f"The image {name!r} has pixels that are not finite; they are shown as 0 or 1"
        )
        return tensor.detach().nan_to_num(nan=0.0, posinf=1.0, neginf=0.0)

    def put_histogram(self, hist_name: str, hist_tensor: Tensor, bins: int = 1000) -> None:
        """Keep the histogram of the finite values of a tensor of any shape, like an image. Synchronizes its device.

        Without such a value nothing is kept. Raises ValueError: these are no real numbers, or ``bins`` is below 1.
        """
        name = self._prefix + hist_name
        if bins < 1:
            raise ValueError(f"histogram {name!r} needs at least 1 bin, got bins={bins!r}")
        try:
            given = torch.as_tensor(hist_tensor).detach()
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"histogram {name!r} must be of a tensor or an array, got {type(hist_tensor).__name__}: {error}"
            ) from error
        if given.is_complex():
            raise ValueError(
                f"histogram {name!r} is of complex numbers; give their abs() or real part"
            )
        values = given.float().flatten().cpu()
        is_finite = values.isfinite()
        if not is_finite.all():
            values = values[is_finite]
            self._warn_once(f"The histogram {name!r} leaves out values that are not finite")
        if values.numel() == 0:
            self._warn_once(f"The histogram {name!r} has no finite value, so it is left out")
            return
        low, high = values.min().item(), values.max().item()
        limits, counts = (
            torch.linspace(low, high, bins + 1, device="cpu")[1:],
            torch.histc(values, bins=bins),
        )
        raw: dict[str, Any] = {
            "min": low,
            "max": high,
            "num": values.numel(),
            "sum": values.sum().item(),
        }
        raw |= {"sum_squares": values.square().sum().item()}
        raw |= {"bucket_limits": limits.tolist(), "bucket_counts": counts.tolist()}
        self._histograms.append(Histogram(name, self.iter, raw))

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text)

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Context in which names get the prefix ``name/``."""
        before, self._prefix = self._prefix, name.rstrip("/") + "/"
        try:
            yield
        finally:
            self._prefix = before

    # ------------------------------------------------------------------ store what waits

    def start_worker(self) -> Worker:
        """From now on a thread stores what waits, and makes the calls of `publish`; it ends with the ``with`` block.

        Raises the first error of this thread since the last call.
        """
        if self.worker is None:
            self.worker = Worker(self, _mark_worker)
        self.worker.raise_error()
        return self.worker

    def flush(self) -> None:
        """Store everything that was put so far. Raises the first error of the worker since the last flush."""
        if self.before_read is not None:
            self.before_read(self)
        if self.rows:
            self.hand_over()
        if self.worker is not None:
            self.worker.wait()

    def hand_over(self) -> None:
        """Store what was put so far: now, or in the worker, without waiting."""
        if self.worker is not None:
            self.worker.submit(self.take())
        elif self.rows:
            self._store()

    def publish(self, call: Callable[[], object]) -> None:
        """Call ``call()``, which may read the storage, after everything that was put so far: at once, or in the worker.

        This storage is the open one then; in the worker it is one with the same values, and what was put so far.
        """
        if self.worker is None:
            with self:
                call()
            return
        if self.before_read is not None:
            self.before_read(self)
        self.worker.submit(self.take(images=True), call)
        self.worker.collect(but=2)  # writers that are slower than the run hold it up

    def take(self, *, images: bool = False) -> "EventStorage":
        """Returns a storage with the same histories and with what waits here; then nothing waits here any more."""
        part = copy.copy(self)
        part.before_read, part.worker = None, None
        part._num_open = 0
        part._numbers = Numbers(_values(self.rows)) if self.rows else None
        self.rows, emptied = [], self if images else part
        emptied._images, emptied._histograms = deque(maxlen=_MAX_IMAGES), deque(maxlen=_MAX_IMAGES)
        return part

    def take_back(self, parts: Sequence["EventStorage"]) -> None:
        """Take the images and histograms that nobody has cleared in storages of `take`."""
        for name in ("_images", "_histograms"):
            kept = [item for part in (*parts, self) for item in getattr(part, name)]
            setattr(self, name, deque(sorted(kept, key=attrgetter("iter")), maxlen=_MAX_IMAGES))

    def _store(self) -> None:
        rows, self.rows = self.rows, []
        numbers, self._numbers = self._numbers or Numbers(_values(rows)), None
        columns: dict[str, tuple[list[float], list[int]]] = {}
        read = iter(numbers.read())
        for iteration, row in rows:
            for name in row:
                if (column := columns.get(name)) is None:
                    columns[name] = column = [], []
                column[0].append(next(read))
                column[1].append(iteration)
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
        """Like ``latest``; for a smoothed scalar, its median over the last ``window_size`` iterations.

        The median is that of the finite values; `counts_left_out` says how many others there are.
        """
        smoothed = self.latest()
        for name, (_, iter) in smoothed.items():
            if self._smoothing_hints[name]:
                history = self._history[name]
                smoothed[name] = history.median(history.count_within(window_size)), iter
        return smoothed

    def counts_left_out(self, window_size: int = 20) -> dict[str, int]:
        """name -> number of values that a median leaves out, since they are not finite; without those that have none.

        A scalar without any finite value in the window is not here: the newest value is shown for it.
        """
        counts = {}
        for name, history in self.histories().items():
            if not self._smoothing_hints[name]:
                continue
            length = history.count_within(window_size)
            count = history.count_not_finite(length)
            if 0 < count < length:
                counts[name] = count
        return counts

    def count_samples(self, name: str, window_size: int = 20) -> int:
        """The number of values in the last ``window_size`` iterations, which end with that of the newest value."""
        return self.history(name).count_within(window_size)

    def smoothing_hints(self) -> dict[str, bool]:
        self.flush()
        return self._smoothing_hints

    def images(self) -> list[Image]:
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
        """Context in which clearing has no effect, so that several writers see the images and histograms."""
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
        """Everything stored, without ``iter``, which belongs to the loop. Images become plain tensors on the CPU."""
        return {
            "histories": {name: history.state_dict() for name, history in self.histories().items()},
            "smoothing_hints": dict(self._smoothing_hints),
            "images": [
                {
                    **image._asdict(),
                    "tensor": torch.as_tensor(image.tensor).detach().cpu().as_subclass(Tensor),
                }
                for image in self.images()
            ],
            "histograms": [histogram._asdict() for histogram in self._histograms],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the content by that of ``state``; ``history_length`` stays."""
        self.flush()
        self._history = {name: HistoryBuffer(self._history_length) for name in state["histories"]}
        for name, saved in state["histories"].items():
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
        opened.reverse()  # so that the innermost entry of this storage is removed
        opened.remove(self)
        opened.reverse()
        _show_innermost()
        self._num_open -= 1
        if self.worker is None or self.is_open:
            return
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


def _values(rows: Sequence[tuple[int, Mapping[str, Any]]]) -> list[Any]:
    return [value for _, row in rows for value in row.values()]
