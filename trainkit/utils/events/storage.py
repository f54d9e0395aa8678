"""Where the loop, the model and the hooks put what happened in an iteration."""

import logging
import operator
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch

from trainkit.utils.events.backlog import Backlog
from trainkit.utils.events.history import HistoryBuffer

logger = logging.getLogger(__name__)

_stack: list["EventStorage"] = []
_thread = threading.local()  # .stack: as _stack, while this thread stores what was put before

_MAX_ITER = 2**63 - 1
_MAX_KINDS_OF_ROWS = 1000  # a model may put other names in each iteration
_MAX_IMAGES = 100  # a rank without a writer never empties the list


def get_event_storage() -> "EventStorage":
    """The innermost storage whose ``with`` block is open.

    Raises:
        RuntimeError: none is open; code that also runs outside training asks ``has_event_storage()`` first.
    """
    stack = _open_storages()
    if not stack:
        raise RuntimeError(
            "no EventStorage is open: put scalars from inside a trainer or a `with EventStorage():` block, "
            "or ask has_event_storage() first"
        )
    return stack[-1]


def has_event_storage() -> bool:
    """Whether one is open, so that ``get_event_storage()`` has something to return."""
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


class _Place(NamedTuple):
    """What is put belongs to it. What is stored later has a place of its own, that at which it was put."""

    iter: int
    prefix: str = ""


class _Rows(NamedTuple):
    """Scalars that are put together, iteration by iteration: stored column by column, they cost a fraction."""

    names: list[str]
    rows: list[tuple[int, list[float], int | None]]  # each iteration, values, epoch


class EventStorage:
    """Scalars with their history, and the newest images and histograms.

    Writers read it; ``get_event_storage()`` finds it inside ``with storage:``. Histories are bounded by
    ``history_length`` values each (see `HistoryBuffer`). What is put waits for the next ``publish`` or read and is
    stored then, in the same order; by a worker thread in a storage that defers (`start_deferring`). What a read returns
    is of that moment: ask again instead of keeping it.
    """

    def __init__(self, start_iter: int = 0, history_length: int = 10_000) -> None:
        self._place = self._later_place = _Place(start_iter)
        self._history_length = history_length
        self._history: dict[str, HistoryBuffer] = {}
        self._smoothing_hints: dict[str, bool] = {}
        self._smoothed: dict[int, dict[str, tuple[float, int]]] = {}  # window -> what was asked for since the last row
        self._epochs: dict[str, int] = {}
        self._images: deque[Image] = deque(maxlen=_MAX_IMAGES)
        self._histograms: deque[Histogram] = deque(maxlen=_MAX_IMAGES)
        self._holds_images = False
        self._backlog = Backlog(self._storing)
        # names, prefix and hint -> rows of these scalars; those that wait to be stored, and which names these have
        self._rows: dict[tuple[str | bool, ...], _Rows] = {}
        self._waiting_rows: list[_Rows] = []
        self._names_of_rows: set[str] = set()

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
            epoch: where writers show it, if they are to show it over epochs.

        Raises:
            ValueError: the name was used before with the other hint, or is one that writers use themselves:
                ``iteration``, and ``epoch`` together with the argument ``epoch``. The value is not one number.
            TypeError: the name is no text.
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
        """``put_scalar`` for each item, whatever its name is."""
        storing = self._backlog.working_thread is not None and self._backlog.is_working()
        place = self._later_place if storing else self._place
        iter = place.iter if cur_iter is None else operator.index(cur_iter)
        if not -_MAX_ITER <= iter <= _MAX_ITER:
            raise OverflowError(f"an iteration must fit into 64 bits, got {iter}")
        if epoch is not None and not place.prefix and "epoch" in values:
            raise ValueError("a scalar called 'epoch' cannot have an epoch itself; give it another name")
        try:
            row = iter, [*map(float, values.values())], None if epoch is None else operator.index(epoch)
        except (TypeError, ValueError):
            _name_what_is_no_number(values)
            raise
        rows = self._rows.get((*values, place.prefix, smoothing_hint))
        if rows is None:  # behind the conversions: what is refused leaves nothing behind
            rows = self._make_rows(values, place.prefix, smoothing_hint)
        if storing:
            self._add(rows, row)
        else:
            self._backlog.append(self._add, rows, row)

    def put_image(self, img_name: str, img_tensor: torch.Tensor) -> None:
        """Keep an image for the writers: shape ``[channel, height, width]``, RGB, float in [0, 1] or uint8.

        A writer that shows images lets them go; the newest 100 are kept until then.
        """
        place = self._present_place()
        self._put(self._images.append, Image(_writable(place.prefix, img_name), img_tensor, place.iter))

    def put_histogram(self, hist_name: str, hist_tensor: torch.Tensor, bins: int = 1000) -> None:
        """Keep the histogram of a tensor of any shape, kept like an image. Synchronizes its device."""
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
        place = self._present_place()
        self._put(self._histograms.append, Histogram(_writable(place.prefix, hist_name), place.iter, raw))

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Everything put inside has ``name/`` before its name."""
        before = self._present_place()
        self._go_to(before._replace(prefix=name.rstrip("/") + "/"))
        try:
            yield
        finally:
            self._go_to(self._present_place()._replace(prefix=before.prefix))

    def _put(self, store: Callable[..., None], *args: Any) -> None:
        if self._backlog.has_worker and not self._backlog.is_working():
            self._backlog.append(store, *args)
        else:
            store(*args)

    def _present_place(self) -> _Place:
        return self._later_place if self._backlog.is_working() else self._place

    def _go_to(self, place: _Place) -> None:
        if self._backlog.is_working():
            self._later_place = place
        else:
            self._place = place

    def _make_rows(self, values: Iterable[str], prefix: str, smoothing_hint: bool) -> "_Rows":
        names = [_writable(prefix, name) for name in values]
        for name in names:
            if name == "iteration":
                raise ValueError("'iteration' is the name under which writers show the iteration; use another name")
            if self._smoothing_hints.get(name, smoothing_hint) is not smoothing_hint:
                raise ValueError(
                    f"scalar {name!r} was put with smoothing_hint={not smoothing_hint} before and now with "
                    f"smoothing_hint={smoothing_hint}; use one hint per name"
                )
        self._smoothing_hints.update(dict.fromkeys(names, smoothing_hint))
        if len(self._rows) >= _MAX_KINDS_OF_ROWS:
            self._rows.clear()  # they are made again
        rows = _Rows(names, [])
        self._rows.update({(*values, prefix, smoothing_hint): rows})
        return rows

    def _add(self, rows: "_Rows", row: tuple[int, list[float], int | None]) -> None:
        """Wait for more rows of the same names, as long as there is no other row with one of these names."""
        if not rows.rows:
            if not self._names_of_rows.isdisjoint(rows.names):
                self._store_rows()
            self._names_of_rows.update(rows.names)
            self._waiting_rows.append(rows)
        rows.rows.append(row)

    def _store_rows(self) -> None:
        if not self._waiting_rows:
            return
        self._smoothed.clear()
        waiting = [(names, rows[:]) for names, rows in self._waiting_rows]
        for _, rows in self._waiting_rows:
            rows.clear()
        self._waiting_rows.clear()
        self._names_of_rows.clear()
        for names, rows in waiting:
            row_iters, values, epochs = zip(*rows, strict=True)
            iters = array("q", row_iters)  # once for all names
            for name, column in zip(names, zip(*values, strict=True), strict=True):
                history = self._history.get(name)
                if history is None:
                    history = self._history[name] = HistoryBuffer(self._history_length)
                history.extend(column, iters)
                if epochs[-1] is not None:
                    self._epochs[name] = epochs[-1]
                else:
                    self._epochs.pop(name, None)

    # ------------------------------------------------------------------ read

    def history(self, name: str) -> HistoryBuffer:
        """
        Raises:
            KeyError: nothing was put under this name.
        """
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
        """Like ``latest``; a smoothed scalar gives its median over the last ``window_size`` iterations."""
        self.flush()
        smoothed = self._smoothed.get(window_size)
        if smoothed is None:  # else another writer has asked before
            smoothed = self._smoothed[window_size] = {}
            for name, history in [*self._history.items()]:  # another thread may add to it
                value, iter = history.latest_with_iter()
                if self._smoothing_hints[name]:
                    value = history.median(history.count_within(window_size))
                smoothed[name] = value, iter
        return dict(smoothed)

    def count_samples(self, name: str, window_size: int = 20) -> int:
        """How many values the last ``window_size`` iterations have, counted back from the newest value."""
        return self.history(name).count_within(window_size)

    def smoothing_hints(self) -> dict[str, bool]:
        self.flush()
        return self._smoothing_hints

    def epochs(self) -> dict[str, int]:
        """name -> the epoch that its newest value was put with, where it was put with one."""
        self.flush()
        return self._epochs

    def images(self) -> list[Image]:
        self.flush()
        return list(self._images)

    def histograms(self) -> list[Histogram]:
        self.flush()
        return list(self._histograms)

    def clear_images(self) -> None:
        self._put(self._clear, self._images)

    def clear_histograms(self) -> None:
        self._put(self._clear, self._histograms)

    @contextmanager
    def hold_images(self) -> Iterator[None]:
        """For several writers in turn: images and histograms stay, whoever clears them."""
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
        """The iteration that what is put now belongs to, counted from 0."""
        return self._present_place().iter

    @iter.setter
    def iter(self, value: int) -> None:
        self._go_to(_Place(int(value), self._present_place().prefix))

    @property
    def iteration(self) -> int:
        return self.iter

    def step(self) -> None:
        """Go on to the next iteration, in a loop without a trainer, which sets ``iter``."""
        self.iter += 1

    def begin_iter(self, iter: int) -> None:
        """What the loop puts from now on belongs to ``iter``; raises as ``raise_error``."""
        self._place = _Place(iter, self._place.prefix)
        self._backlog.raise_error()

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything that was put and is still held; not ``iter``, which is the loop's."""
        self.flush()
        return {
            "histories": {name: history.state_dict() for name, history in self._history.items()},
            "smoothing_hints": dict(self._smoothing_hints),
            "epochs": dict(self._epochs),
            "images": [{**image._asdict(), "tensor": _plain(image.tensor)} for image in self._images],
            "histograms": [histogram._asdict() for histogram in self._histograms],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold what the storage that gave ``state`` held, instead of what is there; ``history_length`` stays."""
        self.flush()
        self._history = {}
        for name, saved in state["histories"].items():
            self._history[name] = HistoryBuffer(self._history_length)
            self._history[name].load_state_dict(saved)
        self._smoothed.clear()
        self._rows.clear()
        self._smoothing_hints, self._epochs = dict(state["smoothing_hints"]), dict(state["epochs"])
        self._images = deque((Image(**image) for image in state["images"]), _MAX_IMAGES)
        self._histograms = deque((Histogram(**histogram) for histogram in state["histograms"]), _MAX_IMAGES)

    # ------------------------------------------------------------------ storing later

    def start_deferring(self) -> None:
        """From now on a worker thread stores what is put; until the ``with`` block ends."""
        self._backlog.start_worker()

    def put_later(self, store: Callable[..., None], *args: Any) -> None:
        """Call ``store(*args)`` in its turn, when somebody reads: in the worker, if there is one, where it may wait.

        What it puts belongs to the iteration and the name scope of now.
        """
        if self._backlog.is_working():
            store(*args)
        else:
            self._backlog.append(self._call_at, self._place, store, args)

    def publish(self, write: Callable[[], None]) -> None:
        """Call ``write()`` behind everything put so far: at once, or in the worker without being waited for."""
        self.put_later(write)
        self.hand_over()

    def hand_over(self) -> None:
        """Store everything put so far, or let the worker begin with that; never waits for it."""
        if not self._backlog.is_working():
            self._backlog.hand_over()

    def raise_error(self) -> None:
        """Raise what has gone wrong in the worker since the last call. Never waits."""
        self._backlog.raise_error()

    def flush(self) -> None:
        """Store everything put so far, or wait until that is done; raise what has gone wrong."""
        if self._backlog.is_working():
            self._store_rows()
        else:
            self._backlog.wait()

    @contextmanager
    def _storing(self) -> Iterator[None]:
        stack = _thread.__dict__.setdefault("stack", [])
        stack.append(self)
        try:
            yield
            self._store_rows()
        finally:
            stack.pop()

    def _call_at(self, place: _Place, store: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._later_place = place
        store(*args)

    # ------------------------------------------------------------------ context

    def __enter__(self) -> "EventStorage":
        _open_storages().append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _open_storages().remove(self)
        try:
            self.flush()
        except Exception:
            if error is None:
                raise
            logger.exception("Storing or writing metrics failed as well:")
        finally:
            self._backlog.close()


def _writable(prefix: str, name: str) -> str:
    """The whole name; a lone surrogate, which no file takes, becomes its escape: ``"\\ud800"``."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a scalar or an image must be text, got {name!r}; use str(name)")
    return (prefix + name).encode("utf-8", "backslashreplace").decode()


def _name_what_is_no_number(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        try:
            float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"scalar {name!r} must be one number or a tensor of one element, got {type(value).__name__}: {error}"
            ) from error


def _plain(image: Any) -> torch.Tensor:
    """Some put arrays, and subclasses of tensors, which a checkpoint does not take."""
    return torch.as_tensor(image).detach().cpu().as_subclass(torch.Tensor)
