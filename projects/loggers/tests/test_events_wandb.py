"""Weights & Biases in offline mode, with the real package; what it has written is read back."""

import importlib
import importlib.util
import math
import os
import sys

import numpy as np
import pytest
import torch
from trainkit.projects.loggers.tests.wandb_file import finished_runs
from trainkit.projects.loggers.tests.written import write

from trainkit.utils.events import EventStorage, WandbWriter


def needs_wandb(test):
    """wandb starts a process for each run."""
    return pytest.mark.slow(pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")(test))


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    if "wandb" in sys.modules:  # another test may have started it, with other settings
        sys.modules["wandb"].teardown()
    monkeypatch.chdir(tmp_path)


def rows(run):
    """Without clock readings."""
    return [{k: v for k, v in row.items() if k not in ("_timestamp", "_runtime")} for row in run["rows"]]


@needs_wandb
def test_rows_have_the_iteration_as_step_and_nothing_that_comes_late_is_lost(tmp_path):
    writer = WandbWriter(tmp_path, window_size=3, id="abc", config={"SOLVER": {"BASE_LR": 0.1}})
    with EventStorage() as storage:
        for storage.iter, loss in enumerate([9.0, 1.0, 8.0, 2.5]):
            storage.put_scalar("loss", loss)
        writer.write()
        storage.put_scalar("late", 0.25, cur_iter=1)
        storage.put_scalar("top1", 50.0)
        writer.write()
        writer.write()
        storage.iter = 9
        storage.put_scalars(bad=math.nan, high=math.inf)
        writer.write()
        writer.close()

    [run] = finished_runs(tmp_path)
    assert rows(run) == [
        {"_step": 3, "iteration": 3, "loss": 2.5},
        {"_step": 4, "iteration": 1, "late": 0.25},
        {"_step": 5, "iteration": 3, "top1": 50.0},
        {"_step": 9, "iteration": 9, "bad": pytest.approx(math.nan, nan_ok=True), "high": math.inf},
    ]
    assert run["axes"] == {"*": "iteration"}
    assert (run["file"], run["exit"]) == ("run-abc", 0)
    assert run["config"]["SOLVER"] == {"BASE_LR": 0.1}


@needs_wandb
def test_images_and_histograms_arrive_and_are_let_go(tmp_path):
    from PIL import Image

    writer = WandbWriter(tmp_path)
    rgb = torch.arange(24, dtype=torch.uint8).reshape(3, 2, 4)
    with EventStorage(5) as storage:
        storage.put_image("rgb", rgb)
        storage.put_image("gray", torch.tensor([[[0.0, 0.5, 2.0]]]))
        storage.put_histogram("few", torch.arange(6.0), bins=2)
        storage.put_histogram("many", torch.arange(1001.0), bins=1000)
        writer.write()
        assert (storage.images(), storage.histograms()) == ([], [])
        writer.close()

    [run] = finished_runs(tmp_path)
    [row] = rows(run)
    assert (row["_step"], row["iteration"]) == (5, 5)
    assert (row["few/values"], row["few/bins"]) == ([3, 3], [0, 2.5, 5])
    assert (row["many/values"], row["many/bins"]) == ([2] * 499 + [3], [*range(0, 1001, 2)])
    [folder] = (tmp_path / "wandb").glob("offline-run-*/files")
    assert np.array_equal(Image.open(folder / row["rgb/path"]), rgb.permute(1, 2, 0).numpy())
    assert np.array_equal(Image.open(folder / row["gray/path"]), [[0, 127, 255]])


@needs_wandb
@pytest.mark.parametrize("load", [True, False])
def test_a_resumed_run_repeats_the_steps_behind_the_checkpoint_in_the_same_run(tmp_path, load):
    first = WandbWriter(tmp_path, id="a")
    write(first, 3, loss=1.0, top1=2.0)
    torch.save(first.state_dict(), tmp_path / "state.pth")
    write(first, 3, late=0.5)
    write(first, 7, loss=3.0)
    first.close()

    second = WandbWriter(tmp_path, id="b")
    if load:
        second.load_state_dict(torch.load(tmp_path / "state.pth", weights_only=True))
    write(second, 3, late=0.5)
    write(second, 7, loss=3.0)
    second.close()

    killed, resumed = finished_runs(tmp_path)
    assert (killed["file"] == resumed["file"]) == load
    assert (rows(killed)[1:] == rows(resumed)) == load
    assert [row["_step"] for row in rows(killed)] == [3, 4, 7]


# ---------------------------------------------------------------------- what goes wrong


class Broken:
    """Stands for the module wandb."""

    disabled = False

    def __init__(self, error):
        self.error, self.calls = error, []

    def init(self, **kwargs):
        return self

    def define_metric(self, *args, **kwargs):
        pass

    def log(self, row, step, commit):
        self.calls.append(step)
        if self.error is not None:
            raise self.error

    def finish(self):
        self.log({}, -1, True)


@pytest.fixture
def broken(monkeypatch):
    real = importlib.import_module

    def broken(error):
        module = Broken(error)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
        monkeypatch.setattr("importlib.import_module", lambda name: module if name == "wandb" else real(name))
        return module

    return broken


def test_an_error_of_wandb_is_one_line_in_the_log_and_nothing_more_is_written_in_this_training(
    tmp_path, broken, caplog
):
    wandb = broken(RuntimeError("no answer"))
    writer = WandbWriter(tmp_path)
    for iter in range(3):
        write(writer, iter, loss=1.0)
    writer.close()

    assert wandb.calls == [0, -1]
    assert caplog.messages == ["Nothing more is written for Weights & Biases, training continues: no answer"] * 2
    wandb.error = None
    write(writer, 4, loss=1.0)
    assert wandb.calls == [0, -1, 4]


# ---------------------------------------------------------------------- a training
