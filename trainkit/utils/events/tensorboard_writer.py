"""Scalars, images, histograms and settings of a run for TensorBoard."""

import glob
import importlib
import logging
import os
import secrets
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainkit.utils.events.storage import EventStorage
from trainkit.utils.events.writers import PictureWriter, Scalar
from trainkit.utils.numbers import is_number
from trainkit.utils.run_file import RunFile, copy_tail

logger = logging.getLogger(__name__)

_PROBE_BYTES = 1 << 16


class TensorboardXWriter(PictureWriter):
    """Scalars, images and histograms for TensorBoard, smoothed; the file is created at the first write.

    The first file also has the settings and the config of the run, for the tabs HPARAMS and TEXT. ``kwargs`` go to
    ``torch.utils.tensorboard.SummaryWriter``. A resumed run moves the events after its checkpoint into files that
    TensorBoard does not read, ``events.cut_1`` and so on; a TensorBoard that is already open hides them by
    ``purge_step``. While the disk is full, scalars are kept like those of `JSONWriter`; images and the events in
    TensorBoard's own queue (usually 10) are lost.

    Args:
        settings: name -> value of the hyper-parameters for comparing runs; values that are not numbers are text.
        config: the whole config as text.
    """

    def __init__(
        self,
        log_dir: str | Path,
        window_size: int = 20,
        *,
        settings: Mapping[str, Any] | None = None,
        config: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(window_size, "tensorboard")
        self._log_dir, self._kwargs = str(log_dir), kwargs
        self._id = secrets.token_hex(4)  # in its file names, so that it cuts no files of other writers
        self._settings, self._config = settings or {}, config
        self._described = False  # whether settings and config are written
        self._on_disk: dict[Path, RunFile] = {}  # the files of this writer, restored if they are deleted
        self._last_step = -1  # the highest step written
        self._purge_step: int | None = None  # for the next file, if it continues earlier files
        self._sizes: dict[str, int] | None = None  # sizes of the run's files; None: all of each file

    def begin(self, trainer: Any) -> None:
        super().begin(trainer)
        importlib.import_module("torch.utils.tensorboard")
        importlib.import_module("tensorboard.plugins.hparams.metadata")

    def write(self) -> None:
        self._restore_deleted()
        super().write()

    def close(self) -> None:
        self._last_step, self._purge_step, self._sizes = -1, None, None
        for file in self._on_disk.values():
            file.close()
        self._on_disk.clear()
        super().close()

    def state_dict(self) -> dict[str, Any]:
        """Give all events to the operating system, then return the state."""
        try:
            self._restore_deleted()
            if self._opened is not None:
                self._opened.flush()
        except OSError as error:
            logger.error("TensorBoard has lost the newest events in %s: %s", self._log_dir, error)
            self._let_go()
        sizes = self._sizes  # these sizes are valid until something is cut
        if sizes is None:
            sizes = {path.name: path.stat().st_size for path in self._files()}
        files = {"id": self._id, "sizes": sizes}
        return {"last_step": self._last_step, "described": self._described, **files, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._last_step = state["last_step"]
        self._described = state.get("described", False)
        self._purge_step = self._last_step + 1
        if "id" in state:
            self._id, self._sizes = state["id"], state["sizes"]

    def _log_all(self, scalars: list[Scalar], storage: EventStorage) -> None:
        steps = [self._last_step]
        try:
            writer = self._writer
            if not self._described:
                self._describe(writer)
            for name, value, iter, epoch in scalars:
                steps.append(iter if epoch is None else epoch)
                writer.add_scalar(name, value, steps[-1])
            for name, tensor, iter in storage.images():
                steps.append(iter)
                writer.add_image(name, tensor, iter)
            for name, iter, raw in storage.histograms():
                steps.append(iter)
                writer.add_histogram_raw(name, **raw, global_step=iter)
        except OSError:
            self._let_go()
            raise
        self._last_step, self._described = max(steps), True

    def _describe(self, writer: Any) -> None:
        if self._settings:
            settings = {name: value if is_number(value) else str(value) for name, value in self._settings.items()}
            # Not the experiment that hparams also returns: TensorBoard would use that of one run for all runs, and hide
            # settings that only other runs have. Without it, TensorBoard collects settings and scalars from all runs.
            _, session_start, _ = importlib.import_module("torch.utils.tensorboard.summary").hparams(settings, {})
            writer.file_writer.add_summary(session_start)
        if self._config:
            writer.add_text("config", textwrap.indent(self._config, "    "), 0)  # Markdown shows it as it is

    def _open(self) -> tuple[Any, Callable[[], None]]:
        # imported late: it takes longer than all of trainkit
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        Path(self._log_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._log_dir) as probe:
            probe.write(bytes(_PROBE_BYTES))  # on a full disk, each try would leave an empty event file
        if self._sizes is not None:
            for path in self._files():
                _cut(path, self._sizes.get(path.name, 0))
            self._sizes = None
        kwargs = {"purge_step": self._purge_step, **self._kwargs, "filename_suffix": self._suffix}
        writer = tensorboard.SummaryWriter(self._log_dir, **kwargs)
        for path in self._files():
            self._on_disk.setdefault(path, RunFile(path)).append("")  # opens the file
        return writer, writer.close

    @property
    def _suffix(self) -> str:
        return f".{self._id}{self._kwargs.get('filename_suffix', '')}"

    def _files(self) -> list[Path]:
        return sorted(Path(self._log_dir).glob(f"*tfevents*{glob.escape(self._suffix)}"))

    def _restore_deleted(self) -> None:
        restored = [file.restore() for file in self._on_disk.values()]
        if any(restored) and self._opened is not None:
            logger.error(
                "TensorBoard's events in %s were deleted during the run; they are written again", self._log_dir
            )
            writer = self._opened
            self._let_go()
            writer.close()

    def _let_go(self) -> None:
        """Drop a `SummaryWriter` that failed, since its thread has ended; the next write opens a new file."""
        self._opened, self._purge_step = None, self._last_step + 1


def _cut(path: Path, length: int) -> None:
    """Move everything after ``length`` bytes to another file; remove the file if nothing is left."""
    if path.stat().st_size > length:
        aside = copy_tail(path, length, "events")
        os.truncate(path, length)
        logger.info("%s is cut at byte %d; the later events are in %s", path, length, aside.name)
    if length == 0:
        path.unlink()
