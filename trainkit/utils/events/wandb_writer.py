"""Scalars, images, histograms and the config of a run for Weights & Biases."""

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

from trainkit.utils.events.storage import EventStorage, Histogram
from trainkit.utils.events.writers import (
    PictureWriter,
    Scalar,
    import_if_installed,
    import_image_formats,
    rows_by_iteration,
)

logger = logging.getLogger(__name__)

_MAX_BINS = 512  # of a wandb.Histogram
_SETTINGS = {
    **{"silent": True, "show_warnings": False, "console": "off"},  # it leaves stdout and stderr alone
    "x_transaction_log_flush_interval": 0.1,  # of what is read offline; 15 s as a rule, which a kill would lose
}


class WandbWriter(PictureWriter):
    """Scalars, smoothed, images and histograms for Weights & Biases.

    Everything is in ``<output_dir>/wandb``; ``WANDB_MODE=offline`` keeps it there, for ``wandb sync`` to send later.
    The step of a row is its iteration, or the next free one where that is taken: steps only grow, wandb drops what
    comes below. Each row has its ``iteration``, over which charts are drawn; rows of scalars that were put with an
    epoch have ``epoch`` as well, and theirs are drawn over that.

    A resumed run goes on in the same run of W&B and repeats the steps after the checkpoint with the same values.
    Online, W&B keeps those that it has. Offline, each start has a folder of its own, named by time and run id, where
    nothing is cut off: one that was killed and the next have these steps both. Rows written at a stop stay.

    The start of training, else the first write, starts the process of wandb, which takes seconds; without an answer of
    the server, as many as ``init_timeout`` in ``settings`` says. An error of wandb is logged, and this training writes
    nothing more to it.

    Args:
        kwargs: for ``wandb.init``, ahead of what is set here; ``settings`` as a dict.

    Raises:
        ImportError: the package ``wandb`` is missing.
    """

    def __init__(self, output_dir: str | os.PathLike[str], window_size: int = 20, **kwargs: Any) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ImportError("WandbWriter needs the package wandb: pip install 'trainkit[wandb]'")
        super().__init__(window_size)
        self._dir, self._kwargs = Path(output_dir).absolute(), kwargs
        self._run: Any = None
        self._has_failed = False
        # from the start, so that every checkpoint has it; a sweep gives the variable
        self._run_id: str = kwargs.get("id") or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
        self._next_step = 0

    def begin(self, trainer: Any) -> None:
        import_image_formats()
        import_if_installed("pandas")  # wandb looks whether a value is one of its tables
        try:
            self._run = self._run or self._open()
        except OSError:
            pass  # the first write says so
        except Exception as error:  # there is no base class of all that wandb raises
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._has_failed = True
        logger.error("Nothing more is written for Weights & Biases, training goes on: %s", error)

    def close(self) -> None:
        super().close()
        self._has_failed = False
        run, self._run = self._run, None
        if run is not None:
            try:
                run.finish()
            except OSError:
                raise
            except Exception as error:
                logger.error("The run of Weights & Biases could not be finished: %s", error)

    def state_dict(self) -> dict[str, Any]:
        """What was written is with the process of wandb, which needs a tenth of a second to bring it into its file."""
        return {"run_id": self._run_id, "next_step": self._next_step, **self._news.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        self._run_id, self._next_step = state["run_id"], state["next_step"]
        self._news.load_state_dict(state)

    def _show(self, scalars: list[Scalar], storage: EventStorage) -> None:
        if self._has_failed:
            return
        try:
            self._log_all(scalars, storage)
        except OSError:
            raise
        except Exception as error:
            self._give_up(error)

    def _log_all(self, scalars: list[Scalar], storage: EventStorage) -> None:
        self._run = self._run or self._open()
        for iter, epoch, row in rows_by_iteration(scalars):
            if epoch is not None:
                for name in row:
                    self._run.define_metric(name, step_metric="epoch")
            self._log(iter, {**row, "iteration": iter} | ({} if epoch is None else {"epoch": epoch}))
        pictures: dict[int, dict[str, Any]] = {}
        wandb = importlib.import_module("wandb")
        for image in storage.images():
            pictures.setdefault(image.iter, {})[image.name] = wandb.Image(_to_array(image.tensor))
        for histogram in storage.histograms():
            counts_and_edges = _bins(histogram)
            pictures.setdefault(histogram.iter, {})[histogram.name] = wandb.Histogram(np_histogram=counts_and_edges)
        for iter, row in sorted(pictures.items()):
            self._log(iter, {**row, "iteration": iter})

    def _log(self, iter: int, row: Mapping[str, Any]) -> None:
        step = max(iter, self._next_step)
        self._run.log(dict(row), step=step, commit=True)  # else it waits for a later step
        self._next_step = step + 1

    def _open(self) -> Any:
        wandb_dir = self._dir / "wandb"
        wandb_dir.mkdir(parents=True, exist_ok=True)
        # its process writes a log into the cache, and reports errors to its makers; at a terminal it would ask for a
        # key, and wait for the answer
        defaults = {
            "WANDB_CACHE_DIR": str(wandb_dir / "cache"),
            "WANDB_ERROR_REPORTING": "false",
            "WANDB_LOGIN_TIMEOUT": "1",
        }
        with _environment(defaults):
            wandb = importlib.import_module("wandb")  # here: it takes as long as torch
            # without create_new it would be a run that somebody else has started
            options = {"dir": str(self._dir), "resume": "allow", "reinit": "create_new", **self._kwargs}
            options["settings"] = _SETTINGS | options.get("settings", {})
            run = wandb.init(**{**options, "id": self._run_id})
        if run.disabled:
            logger.warning("Nothing is written for Weights & Biases: WANDB_MODE says so, or nobody is logged in")
        run.define_metric("*", step_metric="iteration")
        return run


@contextlib.contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Variables that are not set have these values."""
    added = [name for name in defaults if name not in os.environ]
    os.environ.update({name: defaults[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _to_array(image: Any) -> np.ndarray:
    """Shape ``[height, width, channel]``, without the last for one channel; uint8."""
    tensor = torch.as_tensor(image).detach().cpu()
    if tensor.is_floating_point():
        tensor = tensor.mul(255).clamp(0, 255).to(torch.uint8)
    return tensor.permute(1, 2, 0).squeeze(-1).numpy()


def _bins(histogram: Histogram) -> tuple[list[float], list[float]]:
    """Counts and edges; neighbours are added up if there are too many."""
    counts, edges = histogram.raw["bucket_counts"], [histogram.raw["min"], *histogram.raw["bucket_limits"]]
    width = -(-len(counts) // _MAX_BINS)
    return [sum(counts[i : i + width]) for i in range(0, len(counts), width)], [*edges[:-1:width], edges[-1]]
