"""MLflow with the real package and its store of files; what was written is read back by MLflow's own client."""

import importlib.util
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from trainkit.projects.loggers.tests.imports import imported_by_writing
from trainkit.projects.loggers.tests.written import write

from tests.forked import run_forked, script
from trainkit.utils.events import EventStorage, MLflowWriter

ROOT = Path(__file__).parents[3]

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
        storage.put_scalar("top1", 50.0, epoch=2)
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
    assert points(reader, "top1") == [(2, 50.0)]
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


@pytest.mark.parametrize("load", [True, False])
def test_a_resumed_run_goes_on_in_its_run_and_each_point_is_there_once(tmp_path, client, load):
    first = MLflowWriter(tmp_path)
    first.begin(None)
    torch.save(first.state_dict(), tmp_path / "state.pth")
    write(first, 3, loss=1.0, bad=math.nan)
    write(first, 7, loss=3.0)
    first.close()

    second = MLflowWriter(tmp_path)
    if load:
        second.load_state_dict(torch.load(tmp_path / "state.pth", weights_only=True))
    write(second, 3, loss=1.0, bad=math.nan)
    write(second, 7, loss=3.5)  # another value, which is kept as well
    write(second, 9, loss=4.0)
    second.close()

    reader = client()
    assert len(runs(reader)) == (1 if load else 2)
    if load:
        assert points(reader, "loss") == [(3, 1.0), (7, 3.0), (7, 3.5), (9, 4.0)]
        assert len(points(reader, "bad")) == 1


def test_the_run_and_the_experiment_can_be_given(tmp_path, client, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    for value in (1.0, 2.0):
        write(MLflowWriter(tmp_path), 0, a=value)
    reader = client()
    assert [run.info.experiment_id for run in runs(reader)] == [reader.get_experiment_by_name("mine").experiment_id] * 2

    monkeypatch.setenv("MLFLOW_RUN_ID", runs(reader)[0].info.run_id)
    write(MLflowWriter(tmp_path), 1, a=3.0)
    assert len(runs(reader)) == 2


def test_an_error_of_mlflow_is_one_line_in_the_log_and_nothing_more_is_written(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_RUN_ID", "absent")
    writer = MLflowWriter(tmp_path)
    writer.begin(None)
    for iter in range(3):
        write(writer, iter, loss=1.0)
    writer.close()

    [message] = caplog.messages
    assert message.startswith("Nothing more is written for MLflow, training continues: Run 'absent' not found")


def test_a_disk_that_is_full_is_an_os_error_and_each_value_is_there_once_later(tmp_path, client, monkeypatch):
    from mlflow.store.tracking import file_store

    real, full = file_store.append_to, [False]

    def append_to(path, text):
        if full[0] and path.endswith("b"):
            raise OSError(28, "No space left on device")
        real(path, text)

    monkeypatch.setattr(file_store, "append_to", append_to)
    writer = MLflowWriter(tmp_path)
    writer.begin(None)
    with EventStorage() as storage:
        storage.put_scalars(a=1.0, b=2.0)
        full[0] = True
        with pytest.raises(OSError, match="no room for the run of MLflow: .*No space left on device"):
            writer.write()
        full[0] = False
        writer.write()
        writer.close()

    assert (points(client(), "a"), points(client(), "b")) == ([(0, 1.0)], [(0, 2.0)])


# ---------------------------------------------------------------------- a training

JOB = """
import os, signal, sys
import torch
from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer, hooks


class Kill(hooks.HookBase):
    def after_step(self):
        if self.trainer.iter == int(sys.argv[1]):
            self.trainer.storage.flush()
            os.kill(os.getpid(), signal.SIGKILL)


cfg = tiny_cfg("out", "LOG.WRITERS", ["mlflow"], "LOG.PERIOD", 2, "SOLVER.CHECKPOINT_PERIOD", 3, "SEED", 3)
torch.set_num_threads(1)  # a forked process may have another number than a new one
torch.manual_seed(3)
trainer = DefaultTrainer(cfg)
trainer.resume_or_load(resume=True)
trainer.register_hooks([Kill()])
trainer.train()
"""


def test_a_run_that_is_killed_goes_on_in_its_run_and_touches_nothing_but_its_folder(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")

    def train(folder, *kills):
        home = tmp_path / folder / "home"
        home.mkdir(parents=True)
        (home.parent / "job.py").write_text(JOB)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        environment |= {"PYTHONPATH": str(ROOT), "HOME": str(home), "XDG_CONFIG_HOME": str(home)}
        for kill in (*kills, -1):
            if kill == 4:  # by a new interpreter, which imports mlflow by itself
                command = [sys.executable, "-c", JOB, str(kill)]
                done = subprocess.run(command, cwd=home.parent, env=environment, capture_output=True, text=True)
            else:
                done = run_forked(script(home.parent / "job.py", kill), home.parent, environment)
            assert done.returncode == (0 if kill == -1 else -signal.SIGKILL), done.stderr
        assert [*home.iterdir()] == []
        client = MlflowClient((home.parent / "out/mlruns").as_uri())
        [run] = runs(client)
        histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        clocks = ("time", "seconds", "rank_data_time")
        return {
            name: [(point.step, point.value) for point in history]
            for name, history in histories.items()
            if not name.endswith(clocks)
        }

    alone = train("alone")
    assert [step for step, _ in alone["total_loss"]] == [1, 3, 4, 5, 7, 9]
    assert train("killed", 4, 7) == alone


def test_after_the_begin_of_training_a_write_imports_nothing(tmp_path):
    by_begin, by_writing = imported_by_writing("MLflowWriter('started')", tmp_path, started=True)
    assert {"mlflow", "PIL.Image"} < {*by_begin}
    assert by_writing == []
