"""The progress of a run as a bar at the bottom of a terminal."""

import datetime
from typing import Any

from trainkit.utils import comm
from trainkit.utils.events.storage import EventStorage
from trainkit.utils.events.writers import CommonMetricPrinter, name_epoch
from trainkit.utils.logger import NOT_ON_TERMINAL
from trainkit.utils.progress import Bar


class ProgressBar(CommonMetricPrinter):
    """A bar with epoch, ETA, total loss, learning rate and samples per second; log lines go only to files.

    Use it if bars are shown, see `trainkit.utils.progress`. The bar moves in every iteration; its numbers change with
    every ``write()``.
    """

    _extra = NOT_ON_TERMINAL

    _bar: Bar | None = None
    _samples_per_iter = 0  # over all ranks, from the loader's batch size; 0 if it has none

    def advance(self, trainer: Any) -> None:
        if self._bar is None:
            self._bar = Bar(self._max_iter, self._describe(trainer.iter), initial=trainer.iter)
        batch_size = int(getattr(getattr(trainer, "data_loader", None), "batch_size", None) or 0)
        self._samples_per_iter = batch_size * getattr(trainer, "accumulation_steps", 1) * comm.get_data_world_size()
        self._bar.go_to(trainer.iter + 1)

    def close(self) -> None:
        super().close()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show(self, storage: EventStorage, latest: Any, eta_sec: float | None) -> None:
        if self._bar is None:
            return
        # the least important last, since the last ones are left out in a narrow terminal
        details = [] if eta_sec is None else [f"eta {datetime.timedelta(seconds=int(eta_sec))}"]
        details += [
            f"{name} {latest[key][0]:.4g}" for name, key in (("loss", "total_loss"), ("lr", "lr")) if key in latest
        ]
        if "samples_per_sec" in latest:
            details.append(f"{latest['samples_per_sec'][0]:.0f} samples/s")
        elif "time" in latest and self._samples_per_iter:
            details.append(f"{self._samples_per_iter / latest['time'][0]:.0f} samples/s")
        self._bar.describe(self._describe(storage.iter), details)

    def _describe(self, iter: int) -> str:
        return "Training" if self._iters_per_epoch is None else name_epoch(iter, self._iters_per_epoch, self._max_iter)
