"""The base class of writers, and the console writer."""

import datetime
import importlib
import importlib.util
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from trainkit.utils.device import accelerator_runs_ahead
from trainkit.utils.events.storage import EventStorage, get_event_storage
from trainkit.utils.periods import periods_done, say_done
from trainkit.utils.registry import Registry
from trainkit.utils.stateful import refuse_state

logger = logging.getLogger(__name__)

WRITER_REGISTRY = Registry("WRITER")
"""Classes or functions that ``LOG.WRITERS`` can name; called with ``(output_dir, window_size)``, they give a writer.

One that has an argument ``cfg`` also gets the config by this name, or None.
"""

_ETA_WINDOW = 100  # in iterations; the median ignores an evaluation or a slow first batch
_MAX_PENDING = 200  # number of writes kept while the disk is full


class EventWriter:
    """Base class of writers: ``write()`` shows new values of ``get_event_storage()``, ``close()`` ends the output.

    After ``close()`` a writer can be used with another storage; it continues its output.
    """

    def write(self) -> None:
        """Write the new values. Raises OSError if this fails now; the values are kept for a later call."""
        raise NotImplementedError(f"{type(self).__name__} must define write()")

    def begin(self, trainer: Any) -> None:
        """Called by `PeriodicWriter` before each ``train()``."""

    def advance(self, trainer: Any) -> None:
        """Called in the loop after each step, before ``write()``; only if overridden."""

    def close(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        """The state for continuing after the last ``write()``: tensors and plain Python values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the ``write()`` of ``state``; the next write hides or cuts off everything later.

        Raises:
            NotImplementedError: there is a state, but the writer does not override this method.
        """
        refuse_state(self, state)


class Scalar(NamedTuple):
    name: str
    value: float  # smoothed
    iter: int
    epoch: int | None  # the epoch, if the value has one


class ScalarWriter(EventWriter):
    """Base class of writers that show each new value of a scalar once, smoothed. A subclass defines ``_show``.

    If it fails, its scalars are shown by a later write; those of the last 200 writes are kept.
    """

    def __init__(self, window_size: int) -> None:
        if window_size < 1:
            raise ValueError(f"window_size must be >= 1 iteration, got {window_size}")
        self._window_size = window_size
        self._taken: dict[str, int] = {}  # name -> iteration of the newest value that was read
        self._pending: deque[list[Scalar]] = deque(maxlen=_MAX_PENDING)  # what each write has read, until it is shown

    def write(self) -> None:
        storage = get_event_storage()
        epochs = storage.epochs()
        news = [
            Scalar(name, value, iter, epochs.get(name))
            for name, (value, iter) in storage.latest_with_smoothing_hint(self._window_size).items()
            if iter > self._taken.get(name, -1)
        ]
        self._taken |= {scalar.name: scalar.iter for scalar in news}
        if news:
            self._pending.append(news)
        self._show([scalar for news in self._pending for scalar in news], storage)
        self._pending.clear()

    def close(self) -> None:
        self._taken.clear()  # the next storage may have the same iterations
        self._pending.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"taken": dict(self._taken), "pending": [[tuple(scalar) for scalar in news] for news in self._pending]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        self._taken = dict(state["taken"])
        self._pending.extend([Scalar(*scalar) for scalar in news] for news in state["pending"])

    def _show(self, scalars: list[Scalar], storage: EventStorage) -> None:
        """Show the scalars. Raises OSError to get them again, with newer ones."""
        raise NotImplementedError


def rows_by_iteration(scalars: Iterable[Scalar]) -> list[tuple[int, int | None, dict[str, float]]]:
    """Iteration, epoch and scalars of each row, by iteration; scalars with an epoch have separate rows."""
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for name, value, iter, epoch in scalars:
        rows.setdefault((iter, -1 if epoch is None else epoch), {})[name] = value
    return [(iter, None if epoch == -1 else epoch, row) for (iter, epoch), row in sorted(rows.items())]


class PictureWriter(ScalarWriter):
    """Base class of writers that also show images and histograms, and then clear them in the storage.

    A subclass defines how its output is opened and written.

    Raises:
        ImportError: ``package``, which shows them, is missing.
    """

    _opened: Any = None  # an object of the package of the writer
    _finish: Callable[[], None]  # ends the output

    def __init__(self, window_size: int, package: str) -> None:
        super().__init__(window_size)
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"{type(self).__name__} needs the package {package}: pip install 'trainkit[{package}]'")

    @property
    def _writer(self) -> Any:
        """The opened output, under detectron2's name; opens it if needed."""
        if self._opened is None:
            self._opened, self._finish = self._open()
        return self._opened

    def begin(self, trainer: Any) -> None:
        # import before loader workers are forked: a fork during an import in another thread could wait for ever
        importlib.import_module("PIL.Image").preinit()

    def close(self) -> None:
        super().close()
        opened, self._opened = self._opened, None
        if opened is not None:
            self._finish()

    def _show(self, scalars: list[Scalar], storage: EventStorage) -> None:
        if scalars or storage.images() or storage.histograms():
            self._log_all(scalars, storage)
            storage.clear_images()
            storage.clear_histograms()

    def _open(self) -> tuple[Any, Callable[[], None]]:
        """Start the output, or continue it; return it, and the function that ends it."""
        raise NotImplementedError

    def _log_all(self, scalars: list[Scalar], storage: EventStorage) -> None:
        """Write the scalars, and the images and histograms of the storage."""
        raise NotImplementedError


_Latest: TypeAlias = Mapping[str, tuple[float, int]]  # name of a scalar -> (smoothed value, iteration)


class CommonMetricPrinter(EventWriter):
    """One log line: ETA, epoch, iteration, every smoothed scalar, times, learning rate, peak memory of CUDA.

    The ETA is the scalar ``eta_seconds`` of this iteration, else an estimate; there is none without ``max_iter``. When
    ``iter == max_iter``, nothing is logged, since nothing was trained after the last line.

    Args:
        iters_per_epoch: None if there are no epochs.
    """

    _extra: Mapping[str, Any] | None = None  # the ``extra`` of the log record
    _trainer: Any = None  # a weak reference, if there is a trainer
    # these are shown elsewhere in the line
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
        latest, hints = storage.latest_with_smoothing_hint(self._window_size), storage.smoothing_hints()
        eta_sec, last_iter = self._eta_sec(storage, latest), storage.iter
        if self._trainer is not None and not self._trainer.is_training():
            last_iter = self._trainer.last_done_iter  # at the end of a run, storage.iter is the next iteration
        fields = []
        if eta_sec is not None:
            fields.append(f" eta: {datetime.timedelta(seconds=int(eta_sec))} ")
        if self._iters_per_epoch is not None:
            fields.append(f"{name_epoch(last_iter, self._iters_per_epoch, self._max_iter)} ")
        fields.append(f"{say_done(last_iter + 1, self._max_iter)} ")
        fields += [
            f"{name}: {value:.4g} " for name, (value, _) in latest.items() if hints[name] and name not in self._PLACED
        ]
        for name, digits in (("time", ".4f"), ("data_time", ".4f"), ("lr", ".5g")):
            if name in latest:
                fields.append(f"{name}: {latest[name][0]:{digits}} ")
        if accelerator_runs_ahead() and (max_memory := torch.accelerator.memory.max_memory_allocated()):
            fields.append(f"max_mem: {max_memory / 2**20:.0f}M")
        self.logger.info(" ".join(fields), extra=self._extra)
        self._show(storage, latest, eta_sec)

    def begin(self, trainer: Any) -> None:
        self._trainer = trainer
        if self._max_iter is not None:  # another train() may be longer or shorter
            self._max_iter = trainer.max_iter

    def close(self) -> None:
        self._last_write = self._trainer = None  # the time until the next run must not count

    def _show(self, storage: EventStorage, latest: _Latest, eta_sec: float | None) -> None:
        """Called with the values of the line; for a subclass that shows more."""

    def _eta_sec(self, storage: EventStorage, latest: _Latest) -> float | None:
        if self._max_iter is None:
            return None
        eta_sec, put_at = latest.get("eta_seconds", (None, -1))
        if put_at != storage.iter:
            eta_sec = estimate_eta_sec(storage, self._max_iter)
        now = time.perf_counter()
        if eta_sec is None and self._last_write is not None and storage.iter > self._last_write[0]:
            # no hook times the iterations: use the time since the last line
            iter_sec = (now - self._last_write[1]) / (storage.iter - self._last_write[0])
            eta_sec = iter_sec * (self._max_iter - storage.iter - 1)
        self._last_write = (storage.iter, now)
        return eta_sec


def name_epoch(iter: int, iters_per_epoch: int, max_iter: int | None) -> str:
    """``[Epoch n/N]``, counted from 1; the last epoch may end early."""
    of_all = "" if max_iter is None else f"/{periods_done(max_iter - 1, iters_per_epoch) + 1}"
    return f"[Epoch {periods_done(iter, iters_per_epoch) + 1}{of_all}]"


def estimate_eta_sec(storage: EventStorage, max_iter: int) -> float | None:
    """Seconds until ``max_iter`` at the recent median time per iteration; None if there is no ``time``."""
    time_history = storage.histories().get("time")
    return None if time_history is None else time_history.median(_ETA_WINDOW) * (max_iter - storage.iter - 1)
