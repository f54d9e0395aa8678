"""The base class of writers, and the console writer."""

import contextlib
import datetime
import importlib
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from trainkit.utils.device import accelerator_runs_ahead
from trainkit.utils.events.storage import EventStorage, get_event_storage
from trainkit.utils.periods import periods_done, say_done
from trainkit.utils.registry import Registry
from trainkit.utils.stateful import refuse_state

logger = logging.getLogger(__name__)

WRITER_REGISTRY = Registry("WRITER")
"""Classes or functions that ``LOG.WRITERS`` can name; called with ``(output_dir, window_size)``, they give a writer."""

_ETA_WINDOW = 100  # in iterations; the median ignores an evaluation or a slow first batch
_MAX_PENDING = 200  # number of writes kept while the disk is full


class EventWriter:
    """Base of the writers: ``write()`` shows new values of ``get_event_storage()``, ``close()`` ends the output.

    After ``close()`` a writer can be used with another storage; it continues its output.
    """

    def write(self) -> None:
        """Raises OSError if writing fails now; the values are kept for a later call."""
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
    epoch: int | None  # if it has one


class Unwritten:
    """Finds the scalars with a newer value than at the last call, for each name separately."""

    def __init__(self, window_size: int) -> None:
        if window_size < 1:
            raise ValueError(f"window_size must be >= 1 iteration, got {window_size}")
        self._window_size = window_size
        self._taken: dict[str, int] = {}
        self._pending: deque[list[Scalar]] = deque(maxlen=_MAX_PENDING)

    def take(self, storage: EventStorage) -> list[list[Scalar]]:
        """The scalars of this call, after those of earlier calls that were not confirmed."""
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
        """All taken scalars are written."""
        self._pending.clear()

    def forget(self) -> None:
        """Start again, for another storage with the same iterations."""
        self._taken.clear()
        self._pending.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"taken": dict(self._taken), "pending": [[tuple(scalar) for scalar in news] for news in self._pending]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._taken = dict(state["taken"])
        self._pending = deque(([Scalar(*scalar) for scalar in news] for news in state["pending"]), _MAX_PENDING)


def rows_by_iteration(scalars: Iterable[Scalar]) -> list[tuple[int, int | None, dict[str, float]]]:
    """Iteration, epoch and scalars of each row, by iteration; scalars with an epoch have separate rows."""
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for name, value, iter, epoch in scalars:
        rows.setdefault((iter, -1 if epoch is None else epoch), {})[name] = value
    return [(iter, None if epoch == -1 else epoch, row) for (iter, epoch), row in sorted(rows.items())]


def import_if_installed(name: str) -> None:
    """For `EventWriter.begin`: import before loader workers are forked; a fork during an import could wait for ever."""
    with contextlib.suppress(ImportError):
        importlib.import_module(name)


def import_image_formats() -> None:
    """Import the modules that write images."""
    with contextlib.suppress(ImportError):
        importlib.import_module("PIL.Image").preinit()


class PictureWriter(EventWriter):
    """Base of writers that also show images and histograms, and then clear them in the storage."""

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
        raise NotImplementedError


_GIVEN_UP = "Nothing more is written for %s, training continues: %s"


class ServiceWriter(PictureWriter):
    """Base of the writers for other people's services, whose errors do not end a run.

    An error is logged, and this training writes nothing more to the service. Only an ``OSError`` is raised.
    """

    _service: str  # its name in messages

    def __init__(self, window_size: int) -> None:
        super().__init__(window_size)
        self._run: Any = None
        self._has_failed = False

    def begin(self, trainer: Any) -> None:
        import_image_formats()
        import_if_installed("pandas")  # services check whether a value is one of its tables
        with contextlib.suppress(OSError), self._surviving(_GIVEN_UP):  # the first write raises an OSError again
            self._run = self._run or self._open()

    def close(self) -> None:
        super().close()
        run, self._run = self._run, None
        try:
            with self._surviving("The run of %s could not be finished: %s"):
                if run is not None:
                    self._finish(run)
        finally:
            self._has_failed = False

    def _show(self, scalars: list[Scalar], storage: EventStorage) -> None:
        with self._surviving(_GIVEN_UP):
            if not self._has_failed:
                self._run = self._run or self._open()
                self._log_all(scalars, storage)

    @contextlib.contextmanager
    def _surviving(self, message: str) -> Iterator[None]:
        try:
            yield
        except OSError:
            raise
        except Exception as error:  # services have no common base class of their errors
            self._has_failed = True
            logger.error(message, self._service, error)

    def _open(self) -> Any:
        """Start the run of the service, or continue it."""
        raise NotImplementedError

    def _finish(self, run: Any) -> None:
        """End what ``_open`` returned."""
        raise NotImplementedError

    def _log_all(self, scalars: list[Scalar], storage: EventStorage) -> None:
        raise NotImplementedError


@contextlib.contextmanager
def default_environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Context in which environment variables that are not set have these values."""
    added = [name for name in defaults if name not in os.environ]
    os.environ.update({name: defaults[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def to_uint8_array(image: Any) -> np.ndarray:
    """The image as uint8 ``[height, width, channel]``, or ``[height, width]`` for one channel; floats are in [0, 1]."""
    tensor = torch.as_tensor(image).detach().cpu()
    if tensor.is_floating_point():
        tensor = tensor.mul(255).clamp(0, 255).to(torch.uint8)
    return tensor.permute(1, 2, 0).squeeze(-1).numpy()


_Latest: TypeAlias = Mapping[str, tuple[float, int]]  # name of a scalar -> (smoothed value, iteration)


class CommonMetricPrinter(EventWriter):
    """One log line: ETA, epoch, iteration, every smoothed scalar, times, learning rate, peak memory of CUDA.

    The ETA is the scalar ``eta_seconds`` of this iteration, else an estimate; there is none without ``max_iter``. When
    ``iter == max_iter``, nothing is logged, since nothing was trained after the last line.

    Args:
        iters_per_epoch: None: there are no epochs.
    """

    _extra: Mapping[str, Any] | None = None  # of the log record
    # shown elsewhere in the line
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
        if self._max_iter is not None:  # another train() may be longer or shorter
            self._max_iter = trainer.max_iter

    def close(self) -> None:
        self._last_write = None  # the time until the next run must not count

    def _show(self, storage: EventStorage, latest: _Latest, eta_sec: float | None) -> None:
        """For a subclass that shows more than the line."""

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
            # no hook times the iterations: use the time since the last line
            iter_sec = (now - self._last_write[1]) / (storage.iter - self._last_write[0])
            eta_sec = iter_sec * (self._max_iter - storage.iter - 1)
        self._last_write = (storage.iter, now)
        return eta_sec


def name_epoch(iter: int, iters_per_epoch: int, max_iter: int | None) -> str:
    """``[Epoch n/N]``, counted from 1; the last one may end early."""
    of_all = "" if max_iter is None else f"/{periods_done(max_iter - 1, iters_per_epoch) + 1}"
    return f"[Epoch {periods_done(iter, iters_per_epoch) + 1}{of_all}]"


def estimate_eta_sec(storage: EventStorage, max_iter: int) -> float | None:
    """Seconds until ``max_iter`` at the recent median time per iteration; None if there is no ``time``."""
    time_history = storage.histories().get("time")
    return None if time_history is None else time_history.median(_ETA_WINDOW) * (max_iter - storage.iter - 1)
