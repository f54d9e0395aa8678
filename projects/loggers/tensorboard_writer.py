"""Scalars, images and histograms for TensorBoard."""

import importlib
import os
from pathlib import Path
from typing import Any

from trainkit.utils.events.storage import EventStorage
from trainkit.utils.events.writers import WRITER_REGISTRY, Row, ScalarWriter


class TensorboardXWriter(ScalarWriter):
    """Scalars, images and histograms for the package tensorboard, smoothed; the file is created at the first write.

    ``kwargs`` go to ``torch.utils.tensorboard.SummaryWriter``. The first file of a resumed run lets TensorBoard hide
    the steps after the checkpoint (``purge_step``). After an OSError the next write opens a new file.
    """

    def __init__(self, log_dir: str | Path, window_size: int = 20, **kwargs: Any) -> None:
        super().__init__(window_size)
        self._log_dir = str(log_dir)
        self._kwargs = kwargs
        self._opened: Any = None
        self._last_step = -1  # the highest step written
        self._purge_step: int | None = None  # for the next file, if it continues earlier files

    @property
    def _writer(self) -> Any:
        """The ``SummaryWriter``, under detectron2's name; opens it if needed."""
        if self._opened is None:  # imported late: it takes longer than all of trainkit
            summary_writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
            arguments = {"purge_step": self._purge_step, **self._kwargs}
            self._opened = summary_writer(self._log_dir, **arguments)
        return self._opened

    def begin(self, trainer: Any) -> None:
        # import before loader workers are forked: a fork during an import in another thread could wait for ever
        importlib.import_module("torch.utils.tensorboard")
        importlib.import_module("PIL.Image").preinit()

    def close(self) -> None:
        super().close()
        self._last_step = -1
        self._purge_step = None
        opened = self._opened
        self._opened = None
        if opened is not None:
            opened.close()

    def state_dict(self) -> dict[str, Any]:
        if self._opened is not None:
            self._opened.flush()  # gives all events to the operating system
        return {"last_step": self._last_step, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._last_step = state["last_step"]
        self._purge_step = self._last_step + 1

    def _show(self, rows: list[Row], storage: EventStorage) -> None:
        images = storage.images()
        histograms = storage.histograms()
        if not rows and not images and not histograms:
            return
        steps = [self._last_step]
        try:
            for iter, row in rows:
                steps.append(iter)
                for name, value in row.items():
                    self._writer.add_scalar(name, value, iter)
            for name, tensor, iter in images:
                steps.append(iter)
                self._writer.add_image(name, tensor, iter)
            for name, iter, raw in histograms:
                steps.append(iter)
                self._writer.add_histogram_raw(name, **raw, global_step=iter)
        except OSError:
            self._opened = None  # its thread has ended
            self._purge_step = self._last_step + 1
            raise
        self._last_step = max(steps)
        storage.clear_images()
        storage.clear_histograms()


@WRITER_REGISTRY.register()
def tensorboard(output_dir: str | os.PathLike[str], window_size: int) -> TensorboardXWriter:
    return TensorboardXWriter(Path(output_dir), window_size)
