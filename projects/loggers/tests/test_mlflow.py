"""MLflow with the real package and its store of files; what was written is read back by MLflow's own client."""

import importlib.util
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from trainkit.utils.events import EventStorage, MLflowWriter

pytestmark = [
    pytest.mark.slow,  # importing mlflow takes seconds
    pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow"),
    # of mlflow's own modules
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def client(monkeypatch, tmp_path):
    """Reads ``tmp_path``."""
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        return lambda: MlflowClient((tmp_path / "mlruns").as_uri())


def write(writer, iter, **scalars):
    with EventStorage(iter) as storage:
        for name, value in scalars.items():
            storage.put_scalar(name, value, smoothing_hint=False)
        writer.write()


def runs(client):
    return client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])


def points(client, name):
    [run] = runs(client)
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]


def test_scalars_settings_and_config_arrive_and_nothing_that_comes_late_is_lost(tmp_path, client):
    settings = {f"KEY_{i}": i for i in range(150)} | {"SOLVER.BASE_LR": 0.1, "LONG": "x" * 7000}
    writer = MLflowWriter(tmp_path, window_size=3, settings=settings, config="SEED: 3\n")
    with EventStorage() as storage:
        for storage.iter, loss in enumerate([9.0, 1.0, 8.0, 2.5]):
            storage.put_scalar("loss", loss)
        writer.write()
        storage.put_scalar("late", 0.1 + 0.2, cur_iter=1)
        storage.put_scalar("top1", 50.0)
        writer.write()
        writer.write()
        storage.iter = 9
        storage.put_scalars(bad=math.nan, high=math.inf)
        storage.put_scalar("lr of 'a' [1]", 0.5)
        writer.write()
        writer.close()

    reader = client()
    assert points(reader, "loss") == [(3, 2.5)]
    assert points(reader, "late") == [(1, 0.1 + 0.2)]
    assert points(reader, "top1") == [(3, 50.0)]
    assert points(reader, "bad") == [(9, pytest.approx(math.nan, nan_ok=True))]
    assert points(reader, "high") == [(9, math.inf)]
    assert points(reader, "lr of _a_ _1_") == [(9, 0.5)]
    [run] = runs(reader)
    assert (run.info.status, run.info.run_name) == ("FINISHED", tmp_path.name)
    assert run.data.params == {name: str(value)[:6000] for name, value in settings.items()}
    assert Path(reader.download_artifacts(run.info.run_id, "config.yaml")).read_text() == "SEED: 3\n"


def test_images_are_files_of_the_run(tmp_path, client):
    from PIL import Image

    writer = MLflowWriter(tmp_path)
    rgb = torch.arange(24, dtype=torch.uint8).reshape(3, 2, 4)
    with EventStorage(5) as storage:
        storage.put_image("rgb", rgb)
        storage.put_image("val/gray", torch.tensor([[[0.0, 0.5, 2.0]]]))
        storage.put_histogram("few", torch.arange(6.0), bins=2)
        writer.write()
        assert (storage.images(), storage.histograms()) == ([], [])
        writer.close()

    reader = client()
    [run] = runs(reader)
    folder = Path(reader.download_artifacts(run.info.run_id, "images"))
    assert np.array_equal(Image.open(folder / "rgb/0000005.png"), rgb.permute(1, 2, 0).numpy())
    assert np.array_equal(Image.open(folder / "val/gray/0000005.png"), [[0, 127, 255]])


def test_a_resumed_run_continues_its_run(tmp_path, client):
    first = MLflowWriter(tmp_path)
    first.begin(None)
    torch.save(first.state_dict(), tmp_path / "state.pth")
    write(first, 3, loss=1.0, bad=math.nan)
    write(first, 7, loss=3.0)
    first.close()

    second = MLflowWriter(tmp_path)
    second.load_state_dict(torch.load(tmp_path / "state.pth", weights_only=True))
    write(second, 3, loss=1.0, bad=math.nan)
    write(second, 9, loss=4.0)
    second.close()

    assert sorted({*points(client(), "loss")}) == [(3, 1.0), (7, 3.0), (9, 4.0)]  # of one run


def test_an_error_of_mlflow_is_one_line_in_the_log_and_nothing_more_is_written(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_RUN_ID", "absent")
    writer = MLflowWriter(tmp_path)
    writer.begin(None)
    for iter in range(3):
        write(writer, iter, loss=1.0)
    writer.close()

    [message] = caplog.messages
    assert message.startswith("Nothing more is written for MLflow, training continues: Run 'absent' not found")
