"""The base of the writers, which read the storage in which they are called and show it, and that of the console."""

import contextlib
import datetime
import importlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from trainkit.utils.device import accelerator_runs_ahead
from trainkit.utils.events.storage import EventStorage, get_event_storage
from trainkit.utils.periods import periods_done, say_done
from trainkit.utils.stateful import refuse_state

logger = logging.getLogger(__name__)

_ETA_WINDOW = 100  # iterations; the median over them ignores an evaluation or a slow first batch
_MAX_PENDING = 200  # writes that a full disk can hold up before the oldest ones are lost


class EventWriter:
    """Base of the writers: ``write()`` shows what is new in ``get_event_storage()``, ``close()`` ends the output.

    After ``close()`` a writer can be used with another storage: it goes on after what it wrote.
    """

    def write(self) -> None:
        """
        Raises:
            OSError: it is impossible now; what was to be written is kept for a later call.
        """
        raise NotImplementedError(f"{type(self).__name__} must define write()")

    def begin(self, trainer: Any) -> None:
        """Called before a run, or a part of it, by `PeriodicWriter`."""

    def advance(self, trainer: Any) -> None:
        """Called in the loop after each step, in front of a ``write()`` that is due there; only if overridden."""

    def close(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on after the last ``write()``: tensors and plain Python values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the ``write()`` that ``state`` is of; the next one hides or cuts off what came later.

        Raises:
            NotImplementedError: there is a state, and the writer does not say how to load it.
        """
        refuse_state(self, state)


class Scalar(NamedTuple):
    name: str
    value: float  # smoothed
    iter: int
    epoch: int | None  # if it was put with one


class Unwritten:
    """Which scalars have a newer value than at the last call, each name on its own, so that none is lost."""

    def __init__(self, window_size: int) -> None:
        if window_size < 1:
            raise ValueError(f"window_size must be >= 1 iteration, got {window_size}")
        self._window_size = window_size
        self._taken: dict[str, int] = {}
        self._pending: deque[list[Scalar]] = deque(maxlen=_MAX_PENDING)

    def take(self, storage: EventStorage) -> list[list[Scalar]]:
        """The scalars of this call, after those of earlier calls that no ``confirm`` has followed."""
        epochs = storage.epochs()
        news = [
            Scalar(name, value, iter, epochs.get(name))
            for name, (value, iter) in storage.latest_with_smoothing_hint(self._window_size).items()
            if iter > self._taken.get(name, -1)
        ]
        self._taken.update((scalar.name, scalar.iter) for scalar in news)
        if news:
            self._pending.append(news)
        return list(self._pending)

    def confirm(self) -> None:
        """Everything that was taken is written."""
        self._pending.clear()

    def forget(self) -> None:
        """Begin with another storage, whose iterations may be the same again."""
        self._taken.clear()
        self._pending.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"taken": dict(self._taken), "pending": [[tuple(scalar) for scalar in news] for news in self._pending]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._taken = dict(state["taken"])
        self._pending = deque(([Scalar(*scalar) for scalar in news] for news in state["pending"]), _MAX_PENDING)


def rows_by_iteration(scalars: Iterable[Scalar]) -> list[tuple[int, int | None, dict[str, float]]]:
    """Iteration, epoch and scalars of each row, by iteration; those with an epoch have rows of their own."""
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for name, value, iter, epoch in scalars:
        rows.setdefault((iter, -1 if epoch is None else epoch), {})[name] = value
    return [(iter, None if epoch == -1 else epoch, row) for (iter, epoch), row in sorted(rows.items())]


def import_if_installed(name: str) -> None:
    """For `EventWriter.begin`: loader workers that are forked while another thread imports may wait for it for ever."""
    with contextlib.suppress(ImportError):
        importlib.import_module(name)


def import_image_formats() -> None:
    """Import what is needed to write images."""
    with contextlib.suppress(ImportError):
        importlib.import_module("PIL.Image").preinit()


class PictureWriter(EventWriter):
    """Base of the writers that show images and histograms as well, which then go from the storage."""

    def __init__(self, window_size: int) -> None:
        self._news = Unwritten(window_size)

    def write(self) -> None:
        storage = get_event_storage()
        scalars = [scalar for news in self._news.take(storage) for scalar in news]
        if not (scalars or storage.images() or storage.histograms()):
            return
        self._show(scalars, storage)
        self._news.confirm()
        storage.clear_images()
        storage.clear_histograms()

    def close(self) -> None:
        self._news.forget()

    def _show(self, scalars: list[Scalar], storage: EventStorage) -> None:
        """Write these scalars, and the images and histograms of the storage."""
        raise NotImplementedError


_Latest: TypeAlias = Mapping[str, tuple[float, int]]  # name of a scalar -> its smoothed value, its iteration


class CommonMetricPrinter(EventWriter):
    """One log line: ETA (or the ``eta_seconds`` of this iteration), epoch, iteration, every smoothed scalar, times,
    learning rate, peak memory of CUDA.

    Silent once ``iter == max_iter``, when nothing has been trained since the last line. Without ``max_iter``
    there is no ETA.

    Args:
        iters_per_epoch: None: there are no epochs.
    """

    _extra: Mapping[str, Any] | None = None  # of the log record
    # these have places of their own in the line, or are told better by another value of it
    _PLACED = frozenset({"time", "data_time", "rank_data_time", "lr", "eta_seconds"})

    def __init__(
        self, max_iter: int | None = None, window_size: int = 20, *, iters_per_epoch: int | None = None
    ) -> None:
        if window_size < 1:
            raise ValueError(f"window_size must be >= 1 iteration, got {window_size}")
        self.logger = logger
        self._max_iter, self._iters_per_epoch = max_iter, iters_per_epoch
        self._window_size = window_size
        self._last_write: tuple[int, float] | None = None  # iteration, clock

    def write(self) -> None:
        storage = get_event_storage()
        if storage.iter == self._max_iter:
            return
        latest = storage.latest_with_smoothing_hint(self._window_size)
        eta_sec = self._eta_sec(storage, latest)
        self.logger.info(" ".join(self._fields(storage, latest, eta_sec)), extra=self._extra)
        self._show(storage, latest, eta_sec)

    def begin(self, trainer: Any) -> None:
        if self._max_iter is not None:  # as long as this one may be
            self._max_iter = trainer.max_iter

    def close(self) -> None:
        self._last_write = None  # the time until the next run belongs to no iteration

    def _show(self, storage: EventStorage, latest: _Latest, eta_sec: float | None) -> None:
        """For a variant that shows more than the line."""

    def _fields(self, storage: EventStorage, latest: _Latest, eta_sec: float | None) -> list[str]:
        hints = storage.smoothing_hints()
        fields = []
        if eta_sec is not None:
            fields.append(f" eta: {datetime.timedelta(seconds=int(eta_sec))} ")
        if self._iters_per_epoch is not None:
            fields.append(f"{name_epoch(storage.iter, self._iters_per_epoch, self._max_iter)} ")
        fields.append(f"{say_done(storage.iter + 1, self._max_iter)} ")
        fields += [
            f"{name}: {value:.4g} " for name, (value, _) in latest.items() if hints[name] and name not in self._PLACED
        ]
        for name in ("time", "data_time"):
            if name in latest:
                fields.append(f"{name}: {latest[name][0]:.4f} ")
        if "lr" in latest:
            fields.append(f"lr: {latest['lr'][0]:.5g} ")
        if accelerator_runs_ahead() and (max_memory := torch.accelerator.memory.max_memory_allocated()):
            fields.append(f"max_mem: {max_memory / 2**20:.0f}M")
        return fields

    def _eta_sec(self, storage: EventStorage, latest: _Latest) -> float | None:
        if self._max_iter is None:
            return None
        eta_sec, put_at = latest.get("eta_seconds", (None, -1))
        if put_at != storage.iter:
            eta_sec = estimate_eta_sec(storage, self._max_iter)
        now = time.perf_counter()
        if eta_sec is None and self._last_write is not None and storage.iter > self._last_write[0]:
            # nobody times the iterations: take the time since the last line
            iter_sec = (now - self._last_write[1]) / (storage.iter - self._last_write[0])
            eta_sec = iter_sec * (self._max_iter - storage.iter - 1)
        self._last_write = (storage.iter, now)
        return eta_sec


def name_epoch(iter: int, iters_per_epoch: int, max_iter: int | None) -> str:
    """``[Epoch n/N]``, counted from 1; the last one may end early."""
    of_all = "" if max_iter is None else f"/{periods_done(max_iter - 1, iters_per_epoch) + 1}"
    return f"[Epoch {periods_done(iter, iters_per_epoch) + 1}{of_all}]"


def estimate_eta_sec(storage: EventStorage, max_iter: int) -> float | None:
    """Seconds until ``max_iter`` at the recent median time per iteration; None while no ``time`` was put."""
    time_history = storage.histories().get("time")
    return None if time_history is None else time_history.median(_ETA_WINDOW) * (max_iter - storage.iter - 1)
