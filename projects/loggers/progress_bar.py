"""The progress of a run as a bar at the bottom of a terminal."""

import datetime
import importlib
import importlib.util
import logging
import os
import sys
from typing import Any

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from trainkit.utils import comm
from trainkit.utils.events.storage import EventStorage, get_event_storage
from trainkit.utils.events.writers import WRITER_REGISTRY, CommonMetricPrinter, name_epoch

_FORMAT = "{desc} {percentage:3.0f}%|{bar}| after {n_fmt} of {total_fmt}{postfix}"


class ProgressBar(CommonMetricPrinter):
    """A bar with epoch, ETA, total loss, learning rate and samples per second; it moves with every ``write()``.

    Other output goes above the bar. The line of `CommonMetricPrinter` is logged with the level DEBUG, so `log.txt` has
    it. Without ``max_iter`` and ``iters_per_epoch``, those of the trainer are shown.
    """

    _level = logging.DEBUG
    _bar: "tqdm[Any] | None" = None
    _samples_per_iter = 0  # over all ranks, from the loader's batch size; 0 if it has none

    def begin(self, trainer: Any) -> None:
        self._max_iter = trainer.max_iter
        if self._iters_per_epoch is None and getattr(trainer, "has_epochs", False):
            self._iters_per_epoch = trainer.iters_per_epoch
        batch_size = int(getattr(getattr(trainer, "data_loader", None), "batch_size", None) or 0)
        self._samples_per_iter = batch_size * getattr(trainer, "accumulation_steps", 1)
        self._samples_per_iter *= comm.get_world_size() // comm.get_data_group_size()
        if can_show_bars():
            self._stdout = sys.stdout
            self._bar = _tqdm_class()(
                desc=self._describe(trainer.start_iter),
                total=self._max_iter,
                initial=trainer.start_iter,
                file=sys.stdout,
                dynamic_ncols=True,
                bar_format=_FORMAT,
            )
            if not is_notebook():
                sys.stdout = DummyTqdmFile(sys.stdout)  # writes above the bar

    def write(self) -> None:
        super().write()
        storage = get_event_storage()
        if self._bar is None or not storage.histories():
            return
        newest = max(iter for _, iter in storage.latest().values())
        description, details = self._describe(newest), self._details(storage)
        room = (self._bar.format_dict["ncols"] or 200) - len(description) - 40  # 40: for the bar and its counts
        fitting = [text for n, text in enumerate(details, 1) if len("  ".join(details[:n])) <= room]
        self._bar.set_description_str(description, refresh=False)
        self._bar.set_postfix_str("  ".join(fitting), refresh=False)
        self._bar.update(min(newest + 1, self._max_iter or newest + 1) - self._bar.n)
        self._bar.refresh()

    def close(self) -> None:
        super().close()
        bar, self._bar = self._bar, None
        if bar is not None:
            sys.stdout = self._stdout
            bar.close()

    def _details(self, storage: EventStorage) -> list[str]:
        """The least important last, since the last ones are left out in a narrow terminal."""
        latest = {name: value for name, (value, _) in storage.latest_with_smoothing_hint(self._window_size).items()}
        details = []
        if "eta_seconds" in latest:
            details.append(f"eta {datetime.timedelta(seconds=int(latest['eta_seconds']))}")
        details += [
            f"{name} {latest[key]:.4g}" for name, key in (("loss", "total_loss"), ("lr", "lr")) if key in latest
        ]
        if "samples_per_sec" in latest:
            details.append(f"{latest['samples_per_sec']:.0f} samples/s")
        elif "time" in latest and self._samples_per_iter:
            details.append(f"{self._samples_per_iter / latest['time']:.0f} samples/s")
        return details

    def _describe(self, iter: int) -> str:
        return "Training" if self._iters_per_epoch is None else name_epoch(iter, self._iters_per_epoch, self._max_iter)


def can_show_bars() -> bool:
    """Whether stdout is a terminal or a notebook."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return is_terminal or is_notebook()


def is_notebook() -> bool:
    return type(sys.stdout).__module__.partition(".")[0] == "ipykernel"


def _tqdm_class() -> type[tqdm]:
    has_widgets = is_notebook() and importlib.util.find_spec("ipywidgets") is not None
    base = importlib.import_module("tqdm.notebook").tqdm if has_widgets else tqdm
    # 0: no monitor thread, since processes may be forked while it runs
    return type("_Tqdm", (base,), {"monitor_interval": 0})


@WRITER_REGISTRY.register()
def progress_bar(output_dir: str | os.PathLike[str], window_size: int) -> ProgressBar:
    """The writer of LOG.WRITERS."""
    return ProgressBar(0, window_size)
