"""Scalars, images and the settings of a run for MLflow."""

import importlib
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trainkit.projects.loggers.service import ServiceWriter, default_environment, to_uint8_array

from trainkit.config import CfgNode, get_cfg
from trainkit.config.config import changed_settings
from trainkit.utils.events.storage import EventStorage
from trainkit.utils.events.writers import WRITER_REGISTRY, Row


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
        self._dir, self._settings, self._config = Path(output_dir).absolute(), settings or {}, config
        self._run_id: str | None = os.environ.get("MLFLOW_RUN_ID")

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self._run_id, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._run_id = state["run_id"]

    def _open(self) -> tuple[Any, Callable[[], None]]:
        with default_environment({"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}):
            mlflow = importlib.import_module("mlflow")  # imported late: it takes as long as torch
            uri = os.environ.get("MLFLOW_TRACKING_URI") or (self._dir / "mlruns").as_uri()
            client = mlflow.MlflowClient(tracking_uri=uri)
        if self._run_id is not None:
            client.update_run(self._run_id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
            experiment = client.get_experiment_by_name(name)
            experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
            self._run_id = client.create_run(experiment_id, run_name=self._dir.name).info.run_id
            for name, value in self._settings.items():
                client.log_param(self._run_id, _text(name), str(value)[:6000])  # MLflow accepts no more
            if self._config:
                client.log_text(self._run_id, self._config, "config.yaml")
        return client, partial(client.set_terminated, self._run_id)

    def _log_all(self, rows: list[Row], storage: EventStorage) -> None:
        client, metric = self._writer, importlib.import_module("mlflow.entities").Metric
        now_ms = int(time.time() * 1000)
        for iter, row in rows:
            client.log_batch(self._run_id, [metric(_text(name), row[name], now_ms, iter) for name in row])
        for name, tensor, iter in storage.images():
            client.log_image(self._run_id, to_uint8_array(tensor), f"images/{_text(name)}/{iter:07d}.png")


def _text(name: str) -> str:
    return re.sub(r"[^\w\-./: ]", "_", name)  # MLflow does not accept these characters


@WRITER_REGISTRY.register()
def mlflow(output_dir: str | os.PathLike[str], window_size: int, cfg: CfgNode | None = None) -> MLflowWriter:
    """The writer of LOG.WRITERS; the settings of the run are those of ``cfg``."""
    settings = {} if cfg is None else dict(changed_settings(cfg, get_cfg()))
    return MLflowWriter(output_dir, window_size, settings=settings, config="" if cfg is None else cfg.dump())
