"""MLflow with the real package and its store of files; what was written is read back by MLflow's own client."""

import importlib.util
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from trainkit.projects.loggers.tests.test_wandb import write

from trainkit.utils.events import EventStorage, MLflowWriter

pytestmark = [
    pytest.mark.slow,  # importing mlflow takes seconds
    pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow"),
    # of mlflow's own modules
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
    ),
]


@pytest.fixture(autouse=True)
def read(monkeypatch, tmp_path):
    """A function that gives MLflow's client for ``tmp_path``, and its runs."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def read():
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        client = MlflowClient((tmp_path / "mlruns").as_uri())
        return client, client.search_runs(
            [experiment.experiment_id for experiment in client.search_experiments()]
        )

    return read


def test_scalars_settings_config_and_images_arrive_and_nothing_that_comes_late_is_lost(
    tmp_path, read
):
    from PIL import Image

    settings = {f"KEY_{i}": i for i in range(150)} | {"SOLVER.BASE_LR": 0.1, "LONG": "x" * 7000}
    writer = MLflowWriter(tmp_path, window_size=3, settings=settings, config="SEED: 3\n")
    rgb = torch.arange(24, dtype=torch.uint8).reshape(3, 2, 4)
    with EventStorage() as storage:
        for storage.iter, loss in enumerate([9.0, 1.0, 8.0, 2.5]):
            storage.put_scalar("loss", loss)
        writer.write()
        storage.put_scalar("late", 0.1 + 0.2, cur_iter=1)
        writer.write()
        writer.write()
        storage.iter = 9
        storage.put_scalars(bad=math.nan, high=math.inf)
        storage.put_scalar("lr of 'a' [1]", 0.5)
        storage.put_image("rgb", rgb)
        storage.put_image("val/gray", torch.tensor([[[0.0, 0.5, 2.0]]]))
        storage.put_histogram("few", torch.arange(6.0), bins=2)
        writer.write()
        assert storage.images() == []
        assert storage.histograms() == []
        writer.close()

    client, [run] = read()
    points = {
        name: [
            (point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)
        ]
        for name in ("loss", "late", "bad", "high", "lr of _a_ _1_")
    }
    assert points == {
        "loss": [(3, 2.5)],
        "late": [(1, 0.1 + 0.2)],
        "bad": [(9, pytest.approx(math.nan, nan_ok=True))],
        "high": [(9, math.inf)],
        "lr of _a_ _1_": [(9, 0.5)],
    }
    assert run.info.status == "FINISHED"
    assert run.info.run_name == tmp_path.name
    assert run.data.params == {name: str(value)[:6000] for name, value in settings.items()}
    assert (
        Path(client.download_artifacts(run.info.run_id, "config.yaml")).read_text(encoding="utf-8")
        == "SEED: 3\n"
    )
    folder = Path(client.download_artifacts(run.info.run_id, "images"))
    assert np.array_equal(Image.open(folder / "rgb/0000009.png"), rgb.permute(1, 2, 0).numpy())
    assert np.array_equal(Image.open(folder / "val/gray/0000009.png"), [[0, 127, 255]])


def test_a_resumed_run_continues_its_run_and_another_one_starts_its_own(tmp_path, read):
    first = MLflowWriter(tmp_path)
    first.begin(None)
    torch.save(first.state_dict(), tmp_path / "state.pth")
    write(first, 3, loss=1.0)
    write(first, 7, loss=3.0)
    first.close()

    second = MLflowWriter(tmp_path)
    second.load_state_dict(torch.load(tmp_path / "state.pth", weights_only=True))
    write(second, 3, loss=1.0)
    write(second, 9, loss=4.0)
    second.close()

    client, [run] = read()
    found = {
        (point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")
    }
    assert found == {(3, 1.0), (7, 3.0), (9, 4.0)}
    write(MLflowWriter(tmp_path), 3, loss=1.0)
    assert len(read()[1]) == 2
