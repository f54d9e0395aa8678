"""Writers: their base classes, the console, and JSON."""

import datetime
import itertools
import json
import logging
import math
import os
import time
from fractions import Fraction
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

import torch

from trainkit.utils.device import accelerator_runs_ahead
from trainkit.utils.events.storage import EventStorage, get_event_storage
from trainkit.utils.periods import check_period, periods_done, say_done
from trainkit.utils.registry import Registry

logger = logging.getLogger(__name__)

WRITER_REGISTRY = Registry("WRITER")
"""Classes or functions that ``LOG.WRITERS`` can name.

They are called with ``(output_dir, window_size)`` and return a writer. One that has an argument
``cfg`` also gets the config by this name, or None.
"""

_ETA_WINDOW = 100  # in iterations; the median ignores an evaluation or a slow first batch


class EventWriter:
    """Base class of writers.

    After ``close()`` a writer can be used with another storage; it then continues its output.
    """

    def write(self) -> None:
        """Write new values of ``get_event_storage()``.

        An OSError does not end the run; the next call may succeed.
        """
        raise NotImplementedError

    def begin(self, trainer: Any) -> None:
        """Called by `PeriodicWriter` before each ``train()``."""

    def show_progress(self, done: int) -> None:
        """Called after each iteration, with the number of those that are done."""

    def close(self) -> None:
        """End the output."""

    def state_dict(self) -> dict[str, Any]:
        """The state for continuing after the last ``write()``.

        It holds tensors and plain Python values only.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the ``write()`` of ``state``; the next write hides what is later."""


Row: TypeAlias = tuple[int, dict[str, float]]
"""Iteration, and name -> smoothed value."""


class ScalarWriter(EventWriter):
    """Base class of writers that show each new value of a scalar once, smoothed.

    A subclass defines ``_show``. If a median leaves out values that are not finite, their number is
    shown as ``<name>_not_finite``.
    """

    def __init__(self, window_size: int) -> None:
        self._window_size = window_size
        # name -> iteration of the newest value that was shown
        self._shown: dict[str, int] = {}

    def write(self) -> None:
        storage = get_event_storage()
        shown = dict(self._shown)
        left_out = storage.counts_left_out(self._window_size)
        latest = storage.latest_with_smoothing_hint(self._window_size)
        rows: dict[int, dict[str, float]] = {}
        for name, (value, iteration) in latest.items():
            if iteration <= shown.get(name, -1):
                continue
            shown[name] = iteration
            row = rows.setdefault(iteration, {})
            row[name] = value
            if name in left_out:
                row[f"{name}_not_finite"] = left_out[name]
        self._show(sorted(rows.items()), storage)
        self._shown = shown  # not after an error: the next write shows the same again

    def close(self) -> None:
        self._shown.clear()  # the next storage may have the same iterations

    def state_dict(self) -> dict[str, Any]:
        return {"taken": dict(self._shown)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._shown = {name: int(iter) for name, iter in state["taken"].items()}

    def _show(self, rows: list[Row], storage: EventStorage) -> None:
        """Show rows, in the order of their iterations."""
        raise NotImplementedError


class CommonMetricPrinter(EventWriter):
    """One log line: ETA, epoch, iteration, smoothed scalars, times, learning rate, peak memory.

    The ETA needs ``max_iter`` and the scalar ``time``. Nothing is logged before there is a smoothed
    scalar, and when ``iter == max_iter``, since nothing was trained after the last line.

    Args:
        max_iter: where the run ends; None: unknown, and not shown.
        iters_per_epoch: None if there are no epochs.
        min_interval_sec: log nothing if the last line is newer, except after the last iteration.
    """

    _level = logging.INFO
    # these are shown elsewhere in the line
    _PLACED = frozenset({"time", "data_time", "rank_data_time", "lr", "eta_seconds"})

    def __init__(
        self,
        max_iter: int | None = None,
        window_size: int = 20,
        *,
        iters_per_epoch: int | Fraction | None = None,
        min_interval_sec: float = 0.0,
    ) -> None:
        self.logger = logger
        self._max_iter = max_iter
        self._iters_per_epoch = iters_per_epoch
        self._window_size = window_size
        self._min_interval_sec = min_interval_sec
        self._last_time = -math.inf  # of the last line

    def write(self) -> None:
        storage = get_event_storage()
        now = time.perf_counter()
        hints = storage.smoothing_hints()
        if storage.iter == self._max_iter or self._is_too_early(now, storage):
            return
        if not any(hints.values()):
            return
        latest = storage.latest_with_smoothing_hint(self._window_size)
        # at the end of a stopped run, storage.iter is the next iteration
        newest_iter = max(iteration for _, iteration in latest.values())
        iteration = min(storage.iter, newest_iter)

        fields = self._say_progress(iteration, storage)
        left_out = storage.counts_left_out(self._window_size)
        for name, (value, _) in latest.items():
            if not hints[name] or name in self._PLACED:
                continue
            field = f"{name}: {value:.4g}"
            if name in left_out:
                field += f" ({left_out[name]} not finite)"
            fields.append(field)
        if "time" in latest:
            field = f"time: {latest['time'][0]:.4f}"
            if "data_time" in latest:
                field += f" (data {latest['data_time'][0]:.4f})"
            fields.append(field)
        elif "data_time" in latest:
            fields.append(f"data_time: {latest['data_time'][0]:.4f}")
        if "lr" in latest:
            fields.append(f"lr: {latest['lr'][0]:.3g}")
        if accelerator_runs_ahead():
            max_memory = torch.accelerator.memory.max_memory_allocated()
            if max_memory > 0:
                fields.append(f"max_mem: {max_memory / 2**20:.0f}M")
        self._last_time = now
        # the log breaks a long line between fields that are two spaces apart
        self.logger.log(self._level, "  ".join(fields))

    def _is_too_early(self, now: float, storage: EventStorage) -> bool:
        """Whether the last line is so new that this one is left out."""
        is_last_iter = storage.iter + 1 == self._max_iter
        return now - self._last_time < self._min_interval_sec and not is_last_iter

    def _say_progress(self, iteration: int, storage: EventStorage) -> list[str]:
        """The ETA, the epoch and the iteration, as far as they are known."""
        fields = []
        if self._max_iter is not None:
            # that of `PeriodicWriter` counts the time of the hooks too
            stored = storage.histories().get("eta_seconds")
            if stored is not None and stored.latest_with_iter()[1] == storage.iter:
                eta_sec: float | None = stored.latest()
            else:
                eta_sec = estimate_eta_sec(storage, self._max_iter)
            if eta_sec is not None:
                fields.append(f"eta {datetime.timedelta(seconds=int(eta_sec))}")
        if self._iters_per_epoch is not None:
            epoch = str(periods_done(iteration, self._iters_per_epoch) + 1)
            if self._max_iter is not None:  # the last epoch may end early
                last_iter = max(self._max_iter - 1, 0)
                epoch += f"/{periods_done(last_iter, self._iters_per_epoch) + 1}"
            fields.append(f"epoch {epoch}")
        if self._max_iter is None:
            fields.append(say_done(iteration + 1))
        else:
            fields.append(f"after {iteration + 1}/{self._max_iter}")
        return fields

    def begin(self, trainer: Any) -> None:
        if self._max_iter is not None:  # another train() may be longer or shorter
            self._max_iter = trainer.max_iter


def estimate_eta_sec(storage: EventStorage, max_iter: int, hooks_sec: float = 0.0) -> float | None:
    """Seconds until ``max_iter`` at the recent median time of a step.

    None if there is no ``time``.

    Args:
        hooks_sec: between two steps, on average: hooks, evaluations, saves.
    """
    time_history = storage.histories().get("time")
    if time_history is None:
        return None
    remaining_iters = max_iter - storage.iter - 1
    return (time_history.median(_ETA_WINDOW) + hooks_sec) * remaining_iters


class LinesWriter(ScalarWriter):
    """Base class of writers that append lines to a file. A subclass defines ``format``.

    The first write of a resumed run moves the lines after the checkpoint into ``<path>.cut_1`` (or
    ``_2``, ...). The first write of any run also moves a last line that is not complete. If the
    file has lost lines that it had at the checkpoint, a warning says so.

    Args:
        header: written at the start of an empty file.
    """

    _file: FileIO | None = None
    # the byte after which a resumed run continues; None: the end of the file
    _start: int | None = None

    def __init__(self, path: str | Path, window_size: int, header: str = "") -> None:
        super().__init__(window_size)
        self._path = Path(path)
        self._header = header

    def format(self, rows: list[Row]) -> str:
        """The lines for these rows."""
        raise NotImplementedError

    def close(self) -> None:
        super().close()
        if self._file is not None:
            self._file.close()
        self._file = None
        self._start = None

    def state_dict(self) -> dict[str, Any]:
        """The state after all lines are written to the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        if self._start is not None:
            length = self._start
        elif self._path.exists():
            length = self._path.stat().st_size
        else:
            length = 0
        return {"length": length, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        super().load_state_dict(state)
        self._start = check_period("length", state["length"])

    def _show(self, rows: list[Row], storage: EventStorage) -> None:
        if not rows:
            return
        if self._file is None:
            self._file = self._open()
        file = self._file
        if os.fstat(file.fileno()).st_nlink == 0:
            raise FileNotFoundError(f"{self._path} was deleted during the run")
        length = file.seek(0, os.SEEK_END)
        lines = self.format(rows)
        if length == 0:
            lines = self._header + lines
        content = lines.encode(errors="backslashreplace")
        try:
            while content:
                num_written = file.write(content)  # may be a part
                content = content[num_written:]
        except OSError:
            file.truncate(length)  # no part of a line
            raise

    def _open(self) -> FileIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._move_tail_aside()
        self._start = None
        return FileIO(self._path, "ab")

    def _move_tail_aside(self) -> None:
        """Move what is after ``_start`` into another file, and a part of a line before it."""
        content = self._path.read_bytes() if self._path.is_file() else b""
        start = len(content) if self._start is None else self._start
        if start > len(content):
            logger.warning(
                "%s has lost lines since the checkpoint was saved: it has %d bytes, and had %d",
                self._path,
                len(content),
                start,
            )
        end = content.rfind(b"\n", 0, start) + 1
        tail = content[end:]
        if not tail:
            return
        names = (f"{self._path}.cut_{n}" for n in itertools.count(1))
        aside = Path(next(name for name in names if not os.path.lexists(name)))
        aside.write_bytes(tail)
        os.truncate(self._path, end)
        logger.info(
            "%s: the lines after the checkpoint, which this run writes again, are now in %s",
            self._path,
            aside.name,
        )


class JSONWriter(LinesWriter):
    """One line of JSON per iteration with new scalars, smoothed.

    A value that is not finite is ``null``.
    """

    def __init__(self, json_file: str | Path, window_size: int = 20) -> None:
        super().__init__(json_file, window_size)

    def format(self, rows: list[Row]) -> str:
        lines = ""
        for iter, row in rows:
            entries: dict[str, float | None] = {}
            for name, value in row.items():
                entries[name] = value if math.isfinite(value) else None
            entries["iteration"] = iter
            lines += json.dumps(entries, sort_keys=True) + "\n"
        return lines
