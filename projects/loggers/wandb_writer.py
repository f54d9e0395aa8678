"""Scalars, images, histograms and config of a run for Weights & Biases."""

import importlib
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainkit.projects.loggers.service import ServiceWriter, default_environment, to_uint8_array

from trainkit.config import CfgNode
from trainkit.config.yaml_files import load_yaml
from trainkit.utils.events.storage import EventStorage
from trainkit.utils.events.writers import WRITER_REGISTRY, Row

logger = logging.getLogger(__name__)

_MAX_BINS = 512  # limit of wandb.Histogram
_SETTINGS = {
    **{"silent": True, "show_warnings": False, "console": "off"},  # do not change stdout and stderr
    "x_transaction_log_flush_interval": 0.1,  # for the offline file; with the default of 15 s a kill would lose more
}


class WandbWriter(ServiceWriter):
    """Smoothed scalars, images and histograms for Weights & Biases.

    All files are in ``<output_dir>/wandb``; with ``WANDB_MODE=offline`` nothing is sent, and ``wandb sync`` sends it
    later. The step of a row is its iteration, or the next free one: wandb drops rows whose step is not larger than the
    last one. Each row has its ``iteration`` for the x-axis.

    A resumed run continues the same W&B run and writes the steps after the checkpoint again, with the same values.
    Online, W&B keeps the first values. Offline, each start has its own folder, and nothing is cut. ``kwargs``: for
    ``wandb.init``; they win over the values set here. ``settings`` is a dict.
    """

    _service = "Weights & Biases"

    def __init__(self, output_dir: str | os.PathLike[str], window_size: int = 20, **kwargs: Any) -> None:
        super().__init__(window_size, "wandb")
        self._dir, self._kwargs = Path(output_dir).absolute(), kwargs
        # set here, so that every checkpoint has it; a sweep sets the variable
        self._run_id: str = kwargs.get("id") or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
        self._next_step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self._run_id, "next_step": self._next_step, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._run_id, self._next_step = state["run_id"], state["next_step"]

    def _log_all(self, rows: list[Row], storage: EventStorage) -> None:
        wandb, run, pictures = importlib.import_module("wandb"), self._writer, dict[int, dict[str, Any]]()
        for name, tensor, iter in storage.images():
            pictures.setdefault(iter, {})[name] = wandb.Image(to_uint8_array(tensor))
        for name, iter, raw in storage.histograms():
            pictures.setdefault(iter, {})[name] = wandb.Histogram(np_histogram=_bins(raw))
        for iter, row in [*rows, *sorted(pictures.items())]:
            step = max(iter, self._next_step)
            run.log({**row, "iteration": iter}, step=step, commit=True)  # without commit a row waits for a later step
            self._next_step = step + 1

    def _open(self) -> tuple[Any, Callable[[], None]]:
        (self._dir / "wandb").mkdir(parents=True, exist_ok=True)
        # by default wandb's process logs into the cache, reports errors to its makers, and asks a terminal for a key
        defaults = {"WANDB_CACHE_DIR": str(self._dir / "wandb/cache"), "WANDB_ERROR_REPORTING": "false"}
        with default_environment({**defaults, "WANDB_LOGIN_TIMEOUT": "1"}):
            wandb = importlib.import_module("wandb")  # imported late: it takes as long as torch
            # without create_new it could be a run that other code has started
            options = {"dir": str(self._dir), "resume": "allow", "reinit": "create_new", **self._kwargs}
            settings = _SETTINGS | options.get("settings", {})
            run = wandb.init(**{**options, "settings": settings, "id": self._run_id})
        if run.disabled:
            logger.warning("Nothing is written for Weights & Biases, because of WANDB_MODE or a missing login")
        run.define_metric("*", step_metric="iteration")
        return run, run.finish


def _bins(raw: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Counts and edges; if there are too many bins, neighbours are merged."""
    counts, edges = raw["bucket_counts"], [raw["min"], *raw["bucket_limits"]]
    width = -(-len(counts) // _MAX_BINS)
    return [sum(counts[i : i + width]) for i in range(0, len(counts), width)], [*edges[:-1:width], edges[-1]]


@WRITER_REGISTRY.register()
def wandb(output_dir: str | os.PathLike[str], window_size: int, cfg: CfgNode | None = None) -> WandbWriter:
    """The writer of LOG.WRITERS; the settings of the run are those of ``cfg``."""
    return WandbWriter(output_dir, window_size, config=load_yaml("" if cfg is None else cfg.dump(), "cfg"))
