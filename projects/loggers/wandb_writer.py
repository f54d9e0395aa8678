"""Scalars, images, histograms and config of a run for Weights & Biases."""

import contextlib
import importlib
import importlib.util
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainkit.config import CfgNode
from trainkit.config.yaml_files import load_yaml
from trainkit.utils.events.storage import EventStorage
from trainkit.utils.events.writers import WRITER_REGISTRY, Row, ScalarWriter

logger = logging.getLogger(__name__)

_MAX_BINS = 512  # limit of wandb.Histogram
_SETTINGS = {
    **{"silent": True, "show_warnings": False, "console": "off"},  # do not change stdout and stderr
    "x_transaction_log_flush_interval": 0.1,  # for the offline file; with the default of 15 s a kill would lose more
}


class WandbWriter(ScalarWriter):
    """Smoothed scalars, images and histograms for Weights & Biases.

    All files are in ``<output_dir>/wandb``; with ``WANDB_MODE=offline`` nothing is sent, and ``wandb sync`` sends it
    later. The step of a row is its iteration, or the next free one: wandb drops rows whose step is not larger than the
    last one. Each row has its ``iteration`` for the x-axis.

    A resumed run continues the same W&B run and writes the steps after the checkpoint again, with the same values.
    Online, W&B keeps the first values. Offline, each start has its own folder, and nothing is cut. An error is logged,
    and this training writes nothing more for W&B.

    Args:
        kwargs: for ``wandb.init``; they win over the values set here. ``settings`` is a dict.

    Raises:
        ImportError: the package wandb is missing.
    """

    _has_failed = False
    _run: Any = None  # wandb's run, while it is open

    def __init__(self, output_dir: str | os.PathLike[str], window_size: int = 20, **kwargs: Any) -> None:
        super().__init__(window_size)
        if importlib.util.find_spec("wandb") is None:
            raise ImportError("WandbWriter needs the package wandb: pip install 'trainkit[wandb]'")
        self._dir, self._kwargs = Path(output_dir).absolute(), kwargs
        # set here, so that every checkpoint has it; a sweep sets the variable
        self._run_id: str = kwargs.get("id") or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
        self._next_step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self._run_id, "next_step": self._next_step, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._run_id, self._next_step = state["run_id"], state["next_step"]

    def begin(self, trainer: Any) -> None:
        # import before loader workers are forked: a fork during an import in another thread could wait for ever
        importlib.import_module("PIL.Image").preinit()
        with contextlib.suppress(ImportError):
            importlib.import_module("pandas")  # wandb checks whether a value is a table of pandas
        with self._surviving():
            self._open()

    def write(self) -> None:
        with self._surviving():
            if not self._has_failed:
                super().write()

    def close(self) -> None:
        super().close()
        run, self._run = self._run, None
        with self._surviving():
            if run is not None:
                run.finish()
        self._has_failed = False

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # wandb's errors have no common base class
            self._has_failed = True
            logger.error("Nothing more is written for Weights & Biases, training continues: %s", error)

    def _open(self) -> None:
        if self._run is not None:
            return
        folder = self._dir / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        # by default wandb's process logs into the cache, reports errors to its makers, and asks a terminal for a key
        defaults = {"WANDB_CACHE_DIR": str(folder / "cache"), "WANDB_ERROR_REPORTING": "false"}
        with _default_environment({**defaults, "WANDB_LOGIN_TIMEOUT": "1"}):
            wandb = importlib.import_module("wandb")  # imported late: it takes as long as torch
            # without create_new it could be a run that other code has started
            options = {"dir": str(self._dir), "resume": "allow", "reinit": "create_new", **self._kwargs}
            options["settings"] = _SETTINGS | options.get("settings", {})
            self._run = wandb.init(**{**options, "id": self._run_id})
        if self._run.disabled:
            logger.warning("Nothing is written for Weights & Biases, because of WANDB_MODE or a missing login")
        self._run.define_metric("*", step_metric="iteration")

    def _show(self, rows: list[Row], storage: EventStorage) -> None:
        images, histograms = storage.images(), storage.histograms()
        if not rows and not images and not histograms:
            return
        self._open()
        wandb, pictures = importlib.import_module("wandb"), dict[int, dict[str, Any]]()
        for name, tensor, iter in images:
            pictures.setdefault(iter, {})[name] = wandb.Image(_to_uint8_array(tensor))
        for name, iter, raw in histograms:
            pictures.setdefault(iter, {})[name] = wandb.Histogram(np_histogram=_bins(raw))
        for iter, row in [*rows, *sorted(pictures.items())]:
            step = max(iter, self._next_step)
            self._run.log({**row, "iteration": iter}, step=step, commit=True)  # otherwise it waits for a later step
            self._next_step = step + 1
        storage.clear_images()
        storage.clear_histograms()


@contextlib.contextmanager
def _default_environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Context in which environment variables that are not set have these values."""
    added = defaults.keys() - os.environ.keys()
    os.environ.update({name: defaults[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _to_uint8_array(image: Any) -> np.ndarray:
    """The image as uint8 ``[height, width, channel]``, or ``[height, width]`` for one channel; floats are in [0, 1]."""
    tensor = torch.as_tensor(image).detach().cpu()
    if tensor.is_floating_point():
        tensor = tensor.mul(255).clamp(0, 255).to(torch.uint8)
    return tensor.permute(1, 2, 0).squeeze(-1).numpy()


def _bins(raw: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Counts and edges; if there are too many bins, neighbours are merged."""
    counts, edges = raw["bucket_counts"], [raw["min"], *raw["bucket_limits"]]
    width = -(-len(counts) // _MAX_BINS)
    return [sum(counts[i : i + width]) for i in range(0, len(counts), width)], [*edges[:-1:width], edges[-1]]


@WRITER_REGISTRY.register()
def wandb(output_dir: str | os.PathLike[str], window_size: int, cfg: CfgNode | None = None) -> WandbWriter:
    """The writer of LOG.WRITERS; the settings of the run are those of ``cfg``."""
    return WandbWriter(output_dir, window_size, config=load_yaml("" if cfg is None else cfg.dump(), "cfg"))
