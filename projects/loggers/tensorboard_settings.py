"""The settings of a run in TensorBoard."""

import importlib
import os
import textwrap
from collections.abc import Mapping
from typing import Any

from trainkit.config import CfgNode, get_cfg
from trainkit.config.config import changed_settings
from trainkit.utils.events.writers import WRITER_REGISTRY, EventWriter
from trainkit.utils.periods import is_number


class TensorboardSettings(EventWriter):
    """The settings and the config of a run, once, for TensorBoard's tabs HPARAMS and TEXT.

    Args:
        settings: name -> value of the hyper-parameters for comparing runs; values that are not numbers are text.
        config: the whole config as text.
    """

    def __init__(self, log_dir: str | os.PathLike[str], settings: Mapping[str, Any], config: str = "") -> None:
        self._log_dir, self._settings, self._config = os.fspath(log_dir), settings, config
        self._is_written = False

    def write(self) -> None:
        if self._is_written:
            return
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(self._log_dir)
        settings = {name: value if is_number(value) else str(value) for name, value in self._settings.items()}
        # Not the experiment that hparams also returns: TensorBoard would use that of one run for all runs, and hide
        # settings that only other runs have. Without it, TensorBoard collects settings and scalars from all runs.
        _, session_start, _ = importlib.import_module("torch.utils.tensorboard.summary").hparams(settings, {})
        writer.file_writer.add_summary(session_start)
        writer.add_text("config", textwrap.indent(self._config, "    "), 0)  # Markdown shows it as it is
        writer.close()
        self._is_written = True

    def begin(self, trainer: Any) -> None:
        importlib.import_module("torch.utils.tensorboard")
        importlib.import_module("tensorboard.plugins.hparams.metadata")

    def state_dict(self) -> dict[str, Any]:
        return {"is_written": self._is_written}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._is_written = state["is_written"]


@WRITER_REGISTRY.register()
def tensorboard_settings(
    output_dir: str | os.PathLike[str], window_size: int, cfg: CfgNode | None = None
) -> TensorboardSettings:
    """The writer of LOG.WRITERS; the settings of the run are those of ``cfg``."""
    settings = {} if cfg is None else dict(changed_settings(cfg, get_cfg()))
    return TensorboardSettings(output_dir, settings, "" if cfg is None else cfg.dump())
