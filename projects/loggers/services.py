"""Writers for services that compare runs: Weights & Biases, MLflow, and what they have in common."""

import contextlib
import importlib
import importlib.util
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from trainkit.config import CfgNode, get_cfg
from trainkit.config.config import changed_settings
from trainkit.config.yaml_files import Dumper, load_yaml
from trainkit.utils.events.storage import EventStorage
from trainkit.utils.events.writers import WRITER_REGISTRY, Row, ScalarWriter

logger = logging.getLogger(__name__)

_MAX_BINS = 512  # limit of wandb.Histogram
_SETTINGS = {
    # do not change stdout and stderr
    "silent": True,
    "show_warnings": False,
    "console": "off",
    "x_transaction_log_flush_interval": 0.1,  # for the offline file; with the default of 15 s a kill would lose more
}


class ServiceWriter(ScalarWriter):
    """Base class of writers for external services, whose errors do not end a run.

    An error is logged, and this training writes nothing more to the service. A subclass defines ``_open`` and
    ``_log_all``; images and histograms are then cleared in the storage. Raises ImportError: ``package`` is missing.
    """

    _service: str  # its name in messages
    _has_failed = False
    _opened: Any = None  # an object of the package of the service
    _finish: Callable[[], None]  # ends the output

    def __init__(self, window_size: int, package: str) -> None:
        super().__init__(window_size)
        if importlib.util.find_spec(package) is None:
            raise ImportError(
                f"{type(self).__name__} needs the package {package}: pip install "
                f"'trainkit[{package}]'"
            )

    @property
    def _writer(self) -> Any:
        if self._opened is None:
            self._opened, self._finish = self._open()
        return self._opened

    def _open(self) -> tuple[Any, Callable[[], None]]:
        """Start the output, or continue it; return it, and the function that ends it."""
        raise NotImplementedError

    def _log_all(self, rows: list[Row], storage: EventStorage) -> None:
        raise NotImplementedError

    def _show(self, rows: list[Row], storage: EventStorage) -> None:
        has_news = rows or storage.images() or storage.histograms()
        if has_news:
            self._log_all(rows, storage)
            storage.clear_images()
            storage.clear_histograms()

    def begin(self, trainer: Any) -> None:
        # import before loader workers are forked: a fork during an import in another thread could wait for ever
        importlib.import_module("PIL.Image").preinit()
        with contextlib.suppress(ImportError):
            importlib.import_module("pandas")  # services check whether a value is a table of pandas
        with self._surviving():
            _ = self._writer

    def write(self) -> None:
        with self._surviving():
            if not self._has_failed:
                super().write()

    def close(self) -> None:
        super().close()
        with self._surviving():
            if self._opened is not None:
                self._opened = None
                self._finish()
        self._has_failed = False

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # services have no common base class of their errors
            self._has_failed = True
            logger.error(
                "Nothing more is written for %s, training continues: %s", self._service, error
            )


@contextlib.contextmanager
def _default_environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Context in which environment variables that are not set have these values."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
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

    def __init__(
        self, output_dir: str | os.PathLike[str], window_size: int = 20, **kwargs: Any
    ) -> None:
        super().__init__(window_size, "wandb")
        self._dir = Path(output_dir).absolute()
        self._kwargs = kwargs
        # set here, so that every checkpoint has it; a sweep sets the variable
        given_id = kwargs.get("id") or os.environ.get("WANDB_RUN_ID")
        self._run_id: str = given_id or uuid.uuid4().hex[:8]
        self._next_step = 0

    @property
    def run(self) -> Any:
        """The run of wandb, from the start of the training to its end; another thread may log into it."""
        return self._writer

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self._run_id, "next_step": self._next_step, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._run_id = state["run_id"]
        self._next_step = state["next_step"]

    def _log_all(self, rows: list[Row], storage: EventStorage) -> None:
        wandb = importlib.import_module("wandb")
        run = self._writer
        pictures: dict[int, dict[str, Any]] = {}
        for name, tensor, iter in storage.images():
            pictures.setdefault(iter, {})[name] = wandb.Image(_to_uint8_array(tensor))
        for name, iter, raw in storage.histograms():
            pictures.setdefault(iter, {})[name] = wandb.Histogram(np_histogram=_bins(raw))
        for iter, row in [*rows, *sorted(pictures.items())]:
            step = max(iter, self._next_step)
            # without commit a row waits for a later step
            run.log({**row, "iteration": iter}, step=step, commit=True)
            self._next_step = step + 1

    def _open(self) -> tuple[Any, Callable[[], None]]:
        (self._dir / "wandb").mkdir(parents=True, exist_ok=True)
        # by default wandb's process logs into the cache, reports errors to its makers, and asks a terminal for a key
        defaults = {
            "WANDB_CACHE_DIR": str(self._dir / "wandb/cache"),
            "WANDB_ERROR_REPORTING": "false",
            "WANDB_LOGIN_TIMEOUT": "1",
        }
        with _default_environment(defaults):
            wandb = importlib.import_module("wandb")  # imported late: it takes as long as torch
            options: dict[str, Any] = {
                "dir": str(self._dir),
                "resume": "allow",
                # else it could be a run that other code has started
                "reinit": "create_new",
            }
            options |= self._kwargs
            options["settings"] = _SETTINGS | options.get("settings", {})
            options["id"] = self._run_id
            run = wandb.init(**options)
        if run.disabled:
            logger.warning(
                "Nothing is written for Weights & Biases, because of WANDB_MODE or a missing login"
            )
        run.define_metric("*", step_metric="iteration")
        return run, run.finish


def _bins(raw: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Counts and edges; if there are too many bins, neighbours are merged."""
    counts = raw["bucket_counts"]
    edges = [raw["min"], *raw["bucket_limits"]]
    width = -(-len(counts) // _MAX_BINS)  # rounded up
    merged_counts = []
    merged_edges = []
    for start in range(0, len(counts), width):
        merged_counts.append(sum(counts[start : start + width]))
        merged_edges.append(edges[start])
    merged_edges.append(edges[-1])
    return merged_counts, merged_edges


@WRITER_REGISTRY.register()
def wandb(
    output_dir: str | os.PathLike[str], window_size: int, cfg: CfgNode | None = None
) -> WandbWriter:
    """The writer of LOG.WRITERS; the settings of the run are those of ``cfg``."""
    # not cfg.dump(), which leaves out keys that are not set
    text = "" if cfg is None else yaml.dump(cfg, Dumper=Dumper)
    return WandbWriter(output_dir, window_size, config=load_yaml(text, "cfg"))


class MLflowWriter(ServiceWriter):
    """Smoothed scalars, and images, for MLflow; histograms are left out, because MLflow has none.

    Everything is in ``<output_dir>/mlruns``, unless ``MLFLOW_TRACKING_URI`` names a server or a database. The step of a
    value is its iteration. Images are files ``images/<name>/<iteration>.png``. ``MLFLOW_EXPERIMENT_NAME`` and
    ``MLFLOW_RUN_ID`` have their usual meaning. A resumed run continues the same run of MLflow, and writes the values
    after its checkpoint again. ``settings``: name -> value of the hyper-parameters by which runs are compared.
    ``config``: the whole config as text, for the artifact ``config.yaml``.
    """

    _service = "MLflow"

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        window_size: int = 20,
        *,
        settings: Mapping[str, Any] | None = None,
        config: str = "",
    ) -> None:
        super().__init__(window_size, "mlflow")
        self._dir = Path(output_dir).absolute()
        self._settings = settings or {}
        self._config = config
        self._run_id: str | None = os.environ.get("MLFLOW_RUN_ID")

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self._run_id, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._run_id = state["run_id"]

    def _open(self) -> tuple[Any, Callable[[], None]]:
        defaults = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with _default_environment(defaults):
            mlflow = importlib.import_module("mlflow")  # imported late: it takes as long as torch
            uri = os.environ.get("MLFLOW_TRACKING_URI") or (self._dir / "mlruns").as_uri()
            client = mlflow.MlflowClient(tracking_uri=uri)
        if self._run_id is not None:
            client.update_run(self._run_id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
            experiment = client.get_experiment_by_name(name)
            experiment_id = (
                experiment.experiment_id if experiment else client.create_experiment(name)
            )
            self._run_id = client.create_run(experiment_id, run_name=self._dir.name).info.run_id
            for name, value in self._settings.items():
                # MLflow accepts no more
                client.log_param(self._run_id, _text(name), str(value)[:6000])
            if self._config:
                client.log_text(self._run_id, self._config, "config.yaml")
        return client, partial(client.set_terminated, self._run_id)

    def _log_all(self, rows: list[Row], storage: EventStorage) -> None:
        client = self._writer
        entities = importlib.import_module("mlflow.entities")
        now_ms = int(time.time() * 1000)
        for iter, row in rows:
            metrics = []
            for name, value in row.items():
                metrics.append(entities.Metric(_text(name), value, now_ms, iter))
            client.log_batch(self._run_id, metrics)
        for name, tensor, iter in storage.images():
            file = f"images/{_text(name)}/{iter:07d}.png"
            client.log_image(self._run_id, _to_uint8_array(tensor), file)


def _text(name: str) -> str:
    return re.sub(r"[^\w\-./: ]", "_", name)  # MLflow does not accept these characters


@WRITER_REGISTRY.register()
def mlflow(
    output_dir: str | os.PathLike[str], window_size: int, cfg: CfgNode | None = None
) -> MLflowWriter:
    """The writer of LOG.WRITERS; the settings of the run are those of ``cfg``."""
    if cfg is None:
        return MLflowWriter(output_dir, window_size)
    settings = dict(changed_settings(cfg, get_cfg()))
    return MLflowWriter(output_dir, window_size, settings=settings, config=cfg.dump())
