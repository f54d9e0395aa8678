"""The progress of a run as a bar at the bottom of a terminal."""

import logging
import os
import sys
from typing import Any

from tqdm.auto import tqdm
from tqdm.contrib import DummyTqdmFile

from trainkit.utils.events.storage import get_event_storage
from trainkit.utils.events.writers import WRITER_REGISTRY, CommonMetricPrinter


class _Bar(tqdm):
    monitor_interval = 0  # no monitor thread, since processes may be forked while it runs


class ProgressBar(CommonMetricPrinter):
    """tqdm's bar; it moves with the steps, and shows total loss and learning rate of the last ``write()``.

    Other output goes above the bar. The line of `CommonMetricPrinter` has the level DEBUG, so `log.txt` has it.
    """

    _level = logging.DEBUG
    _bar: Any = None

    def begin(self, trainer: Any) -> None:
        self._max_iter = trainer.max_iter
        if self._iters_per_epoch is None and getattr(trainer, "has_epochs", False):
            self._iters_per_epoch = trainer.epoch_length
        if can_show_bars():
            self._stdout = sys.stdout
            self._bar = _Bar(
                desc="Training",
                total=trainer.max_iter,
                initial=trainer.start_iter,
                file=sys.stdout,
                dynamic_ncols=True,
            )
            if sys.stdout.isatty():
                sys.stdout = DummyTqdmFile(sys.stdout)  # writes above the bar

    def write(self) -> None:
        super().write()
        latest = get_event_storage().latest_with_smoothing_hint(self._window_size)
        if self._bar is not None and latest:
            shown = {}
            for name, key in (("loss", "total_loss"), ("lr", "lr")):
                if key in latest:
                    shown[name], _ = latest[key]
            self._bar.set_postfix(shown, refresh=False)
            self.show_progress(max(iter for _, iter in latest.values()) + 1)
            self._bar.refresh()

    def show_progress(self, done: int) -> None:
        if self._bar is not None:
            done = min(done, self._bar.total)
            self._bar.update(max(done - self._bar.n, 0))  # tqdm draws it ten times a second at most

    def close(self) -> None:
        super().close()
        bar = self._bar
        self._bar = None
        if bar is not None:
            sys.stdout = self._stdout
            bar.close()


def can_show_bars() -> bool:
    """Whether stdout is a terminal or a notebook."""
    if sys.stdout is None:
        return False
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    is_notebook = type(sys.stdout).__module__.startswith("ipykernel.")
    return is_terminal or is_notebook


@WRITER_REGISTRY.register()
def progress_bar(output_dir: str | os.PathLike[str], window_size: int) -> ProgressBar:
    return ProgressBar(0, window_size)
