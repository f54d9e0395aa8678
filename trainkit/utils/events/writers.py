"""Writers: they read the storage in which they are called and show it somewhere."""

import datetime
import importlib
import importlib.util
import json
import logging
import math
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from trainkit.utils.events.storage import EventStorage, get_event_storage

_ETA_WINDOW = 200  # iterations; the median over them ignores an evaluation or a slow first batch


class EventWriter:
    """Base of the writers: ``write()`` shows what is new in ``get_event_storage()``, ``close()`` ends the output.

    After ``close()`` a writer can be used with another storage: it goes on behind what it wrote.
    """

    def write(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define write()")

    def close(self) -> None:
        pass


class _Unwritten:
    """Which scalars have a newer value than at the last call, each name on its own, so that none is lost."""

    def __init__(self, window_size: int) -> None:
        if window_size < 1:
            raise ValueError(f"window_size must be >= 1 iteration, got {window_size}")
        self._window_size = window_size
        self._written: dict[str, int] = {}

    def take(self, storage: EventStorage) -> list[tuple[str, float, int, int | None]]:
        """(name, smoothed value, iteration, epoch if it was put with one) of each such scalar."""
        epochs = storage.epochs()
        news = [
            (name, value, iter, epochs.get(name))
            for name, (value, iter) in storage.latest_with_smoothing_hint(self._window_size).items()
            if iter > self._written.get(name, -1)
        ]
        self._written.update((name, iter) for name, _, iter, _ in news)
        return news

    def forget(self) -> None:
        """Begin with another storage, whose iterations may be the same again."""
        self._written.clear()


class JSONWriter(EventWriter):
    """One line of JSON per iteration that has new scalars, smoothed; ``null`` stands for a value that is not finite.

    Scalars that were put with an epoch have a line of their own, with ``epoch`` beside ``iteration``.

    ``[json.loads(line) for line in open(path)]`` or ``pandas.read_json(path, lines=True)`` reads the file. It is
    opened at the first write and only ever appended to.
    """

    def __init__(self, json_file: str | Path, window_size: int = 20) -> None:
        self._path = Path(json_file)
        self._news = _Unwritten(window_size)
        self._file: TextIO | None = None

    def write(self) -> None:
        rows: dict[tuple[int, int], dict[str, float | None]] = {}
        for name, value, iter, epoch in self._news.take(get_event_storage()):
            row = rows.setdefault((iter, -1 if epoch is None else epoch), {"iteration": iter})
            if epoch is not None:
                row["epoch"] = epoch
            row[name] = value if math.isfinite(value) else None
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        for _, row in sorted(rows.items()):
            self._file.write(json.dumps(row, sort_keys=True, allow_nan=False) + "\n")
        self._file.flush()  # no fsync: it would cost more than the step

    def close(self) -> None:
        self._news.forget()
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorboardXWriter(EventWriter):
    """Scalars, images and histograms for TensorBoard, smoothed; no file is made before there is something to write.

    ``kwargs`` go to ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        ImportError: the package ``tensorboard`` is missing.
    """

    def __init__(self, log_dir: str | Path, window_size: int = 20, **kwargs: Any) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError("TensorboardXWriter needs the package tensorboard: pip install 'trainkit[tensorboard]'")
        self._log_dir, self._kwargs = str(log_dir), kwargs
        self._news = _Unwritten(window_size)
        self._writer: Any = None

    def write(self) -> None:
        storage = get_event_storage()
        news, images, histograms = self._news.take(storage), storage.images(), storage.histograms()
        if self._writer is None:
            if not (news or images or histograms):
                return
            # imported here: it takes longer than all of trainkit
            tensorboard = importlib.import_module("torch.utils.tensorboard")
            self._writer = tensorboard.SummaryWriter(self._log_dir, **self._kwargs)
        for name, value, iter, epoch in news:
            self._writer.add_scalar(name, value, iter if epoch is None else epoch)
        for image in images:
            self._writer.add_image(image.name, image.tensor, image.iter)
        for histogram in histograms:
            self._writer.add_histogram_raw(histogram.name, **histogram.raw, global_step=histogram.iter)
        storage.clear_images()
        storage.clear_histograms()

    def close(self) -> None:
        self._news.forget()
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class CommonMetricPrinter(EventWriter):
    """One log line: ETA, iteration, every smoothed scalar, times, learning rate, peak memory of CUDA.

    Silent once ``iter == max_iter``, when nothing has been trained since the last line. Without ``max_iter``
    there is no ETA.
    """

    # these have places of their own in the line, or are told better by another value of it
    _PLACED = frozenset({"time", "data_time", "rank_data_time", "lr", "eta_seconds"})

    def __init__(self, max_iter: int | None = None, window_size: int = 20) -> None:
        if window_size < 1:
            raise ValueError(f"window_size must be >= 1 iteration, got {window_size}")
        self._max_iter = max_iter
        self._window_size = window_size
        self._logger = logging.getLogger(__name__)
        self._last_write: tuple[int, float] | None = None  # iteration, clock

    def write(self) -> None:
        storage = get_event_storage()
        if storage.iter == self._max_iter:
            return
        self._logger.info(" ".join(self._fields(storage)))

    def close(self) -> None:
        self._last_write = None  # the time until the next run belongs to no iteration

    def _fields(self, storage: EventStorage) -> list[str]:
        latest = storage.latest_with_smoothing_hint(self._window_size)
        hints = storage.smoothing_hints()
        fields = []
        eta_sec = self._eta_sec(storage)
        if eta_sec is not None:
            fields.append(f" eta: {datetime.timedelta(seconds=int(eta_sec))} ")
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

    def _eta_sec(self, storage: EventStorage) -> float | None:
        if self._max_iter is None:
            return None
        eta_sec = estimate_eta_sec(storage, self._max_iter)
        now = time.perf_counter()
        if eta_sec is None and self._last_write is not None and storage.iter > self._last_write[0]:
            # nobody times the iterations: take the time since the last line
            iter_sec = (now - self._last_write[1]) / (storage.iter - self._last_write[0])
            eta_sec = iter_sec * (self._max_iter - storage.iter - 1)
        self._last_write = (storage.iter, now)
        return eta_sec


def estimate_eta_sec(storage: EventStorage, max_iter: int) -> float | None:
    """Seconds until ``max_iter`` at the recent median time per iteration; None while no ``time`` was put."""
    if "time" not in storage.latest():
        return None
    return storage.history("time").median(_ETA_WINDOW) * (max_iter - storage.iter - 1)
