"""Writers: they read the storage in which they are called and show it somewhere."""

import datetime
import importlib
import importlib.util
import json
import logging
import math
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from trainkit.utils.events.run_file import RunFile
from trainkit.utils.events.storage import EventStorage, get_event_storage
from trainkit.utils.stateful import refuse_state

logger = logging.getLogger(__name__)

_ETA_WINDOW = 100  # iterations; the median over them ignores an evaluation or a slow first batch
_PROBE_BYTES = 1 << 16
_MAX_PENDING = 200  # writes that a full disk can hold up before the oldest ones are lost


class EventWriter:
    """Base of the writers: ``write()`` shows what is new in ``get_event_storage()``, ``close()`` ends the output.

    After ``close()`` a writer can be used with another storage: it goes on behind what it wrote.
    """

    def write(self) -> None:
        """
        Raises:
            OSError: it is impossible now; what was to be written is kept for a later call.
        """
        raise NotImplementedError(f"{type(self).__name__} must define write()")

    def advance(self, trainer: Any) -> None:
        """Called in the loop after each step, in front of a ``write()`` that is due there; only if overridden."""

    def close(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on behind the last ``write()``: tensors and plain Python values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the ``write()`` that ``state`` is of; the next one hides or cuts off what came later.

        Raises:
            NotImplementedError: there is a state, and the writer does not say how to load it.
        """
        refuse_state(self, state)


class _Scalar(NamedTuple):
    name: str
    value: float  # smoothed
    iter: int
    epoch: int | None  # if it was put with one


class _Unwritten:
    """Which scalars have a newer value than at the last call, each name on its own, so that none is lost."""

    def __init__(self, window_size: int) -> None:
        if window_size < 1:
            raise ValueError(f"window_size must be >= 1 iteration, got {window_size}")
        self._window_size = window_size
        self._taken: dict[str, int] = {}
        self._pending: deque[list[_Scalar]] = deque(maxlen=_MAX_PENDING)

    def take(self, storage: EventStorage) -> list[list[_Scalar]]:
        """The scalars of this call, behind those of earlier calls that no ``confirm`` has followed."""
        epochs = storage.epochs()
        news = [
            _Scalar(name, value, iter, epochs.get(name))
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
        self._pending = deque(([_Scalar(*scalar) for scalar in news] for news in state["pending"]), _MAX_PENDING)


class JSONWriter(EventWriter):
    """One line of JSON per iteration that has new scalars, smoothed; ``null`` stands for a value that is not finite.

    Scalars that were put with an epoch have a line of their own, with ``epoch`` beside ``iteration``.

    ``[json.loads(line) for line in open(path)]`` or ``pandas.read_json(path, lines=True)`` reads the file. It is
    opened at the first write and appended to. In a resumed run that write first moves the lines behind the checkpoint
    into ``<json_file>.cut_1`` (or ``_2``, ...). The rows of the last 200 writes are kept while none succeeds.
    """

    def __init__(self, json_file: str | Path, window_size: int = 20) -> None:
        self._file = RunFile(json_file)
        self._news = _Unwritten(window_size)

    def write(self) -> None:
        # no fsync: it would cost more than the step
        self._file.append("".join(map(_json_lines, self._news.take(get_event_storage()))))
        self._news.confirm()

    def close(self) -> None:
        self._news.forget()
        self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """The lines that it counts are on the disk then."""
        return {"length": self._file.sync(), **self._news.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._file.go_on_at(state["length"])
        self._news.load_state_dict(state)


def _json_lines(scalars: Iterable[_Scalar]) -> str:
    rows: dict[tuple[int, int], dict[str, float | None]] = {}
    for name, value, iter, epoch in scalars:
        row = rows.setdefault((iter, -1 if epoch is None else epoch), {"iteration": iter})
        if epoch is not None:
            row["epoch"] = epoch
        row[name] = value if math.isfinite(value) else None
    return "".join(_encode(row) + "\n" for _, row in sorted(rows.items()))


_encode = json.JSONEncoder(sort_keys=True, allow_nan=False).encode  # json.dumps would make an encoder for each line


class TensorboardXWriter(EventWriter):
    """Scalars, images and histograms for TensorBoard, smoothed; no file is made before there is something to write.

    ``kwargs`` go to ``torch.utils.tensorboard.SummaryWriter``. A resumed run hides what stands behind the checkpoint by
    ``purge_step``. While the disk is full, scalars are kept like those of `JSONWriter`; images are lost, and so are the
    events that stand in TensorBoard's own queue by then (10, as a rule).

    Raises:
        ImportError: the package ``tensorboard`` is missing.
    """

    def __init__(self, log_dir: str | Path, window_size: int = 20, **kwargs: Any) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError("TensorboardXWriter needs the package tensorboard: pip install 'trainkit[tensorboard]'")
        self._log_dir, self._kwargs = str(log_dir), kwargs
        self._news = _Unwritten(window_size)
        self._writer: Any = None
        self._last_step = -1  # the highest one written
        self._purge_step: int | None = None  # for the next file, where it goes on behind others

    def write(self) -> None:
        storage = get_event_storage()
        scalars = [scalar for news in self._news.take(storage) for scalar in news]
        if not (scalars or storage.images() or storage.histograms()):
            return
        try:
            self._last_step = max(self._last_step, *self._show(scalars, storage))
        except OSError:
            self._let_go()
            raise
        self._news.confirm()
        storage.clear_images()
        storage.clear_histograms()

    def close(self) -> None:
        self._news.forget()
        self._last_step, self._purge_step = -1, None
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def state_dict(self) -> dict[str, Any]:
        """What was written is with the operating system then."""
        if self._writer is not None:
            try:
                self._writer.flush()
            except OSError as error:
                logger.error("TensorBoard has lost the newest events in %s: %s", self._log_dir, error)
                self._let_go()
        return {"last_step": self._last_step, **self._news.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        self._last_step = state["last_step"]
        self._purge_step = self._last_step + 1
        self._news.load_state_dict(state)

    def _show(self, scalars: list[_Scalar], storage: EventStorage) -> list[int]:
        """The steps at which there is something."""
        writer = self._writer = self._writer or self._open()
        steps = []
        for name, value, iter, epoch in scalars:
            steps.append(iter if epoch is None else epoch)
            writer.add_scalar(name, value, steps[-1])
        for image in storage.images():
            steps.append(image.iter)
            writer.add_image(image.name, image.tensor, image.iter)
        for histogram in storage.histograms():
            steps.append(histogram.iter)
            writer.add_histogram_raw(histogram.name, **histogram.raw, global_step=histogram.iter)
        return steps

    def _open(self) -> Any:
        # imported here: it takes longer than all of trainkit
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        Path(self._log_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._log_dir) as probe:
            probe.write(bytes(_PROBE_BYTES))  # on a full disk every trial would leave an empty file of events
        purge = {} if self._purge_step is None else {"purge_step": self._purge_step}
        return tensorboard.SummaryWriter(self._log_dir, **{**purge, **self._kwargs})

    def _let_go(self) -> None:
        """The thread of a `SummaryWriter` that could not write has ended; another file goes on."""
        self._writer, self._purge_step = None, self._last_step + 1


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
        self._max_iter, self._iters_per_epoch = max_iter, iters_per_epoch
        self._window_size = window_size
        self._last_write: tuple[int, float] | None = None  # iteration, clock

    def write(self) -> None:
        storage = get_event_storage()
        if storage.iter == self._max_iter:
            return
        latest = storage.latest_with_smoothing_hint(self._window_size)
        eta_sec = self._eta_sec(storage, latest)
        logger.info(" ".join(self._fields(storage, latest, eta_sec)), extra=self._extra)
        self._show(storage, latest, eta_sec)

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
        fields.append(f"iter: {storage.iter} ")
        fields += [
            f"{name}: {value:.4g} " for name, (value, _) in latest.items() if hints[name] and name not in self._PLACED
        ]
        for name in ("time", "data_time"):
            if name in latest:
                fields.append(f"{name}: {latest[name][0]:.4f} ")
                fields.append(f"last_{name}: {storage.history(name).latest():.4f} ")
        if "lr" in latest:
            fields.append(f"lr: {latest['lr'][0]:.5g} ")
        if torch.cuda.is_available():
            fields.append(f"max_mem: {torch.cuda.max_memory_allocated() / 2**20:.0f}M")
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
    of_all = "" if max_iter is None else f"/{-(-max_iter // iters_per_epoch)}"
    return f"[Epoch {iter // iters_per_epoch + 1}{of_all}]"


def estimate_eta_sec(storage: EventStorage, max_iter: int) -> float | None:
    """Seconds until ``max_iter`` at the recent median time per iteration; None while no ``time`` was put."""
    time_history = storage.histories().get("time")
    return None if time_history is None else time_history.median(_ETA_WINDOW) * (max_iter - storage.iter - 1)
