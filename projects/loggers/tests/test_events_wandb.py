"""Weights & Biases in offline mode, with the real package; what it has written is read back."""

import importlib
import importlib.util
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from trainkit.projects.loggers.tests.imports import imported_by_writing
from trainkit.projects.loggers.tests.wandb_file import finished_runs, read_runs
from trainkit.projects.loggers.tests.written import write

from trainkit.utils.events import EventStorage, WandbWriter

ROOT = Path(__file__).parents[3]


def needs_wandb(test):
    """wandb starts a process for each run."""
    return pytest.mark.slow(pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")(test))


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)


def rows(run):
    """Without clock readings."""
    return [{k: v for k, v in row.items() if k not in ("_timestamp", "_runtime")} for row in run["rows"]]


def test_the_package_is_asked_for_by_the_constructor(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ImportError, match=r"WandbWriter needs the package wandb: pip install 'trainkit\[wandb\]'"):
        WandbWriter(tmp_path)


@needs_wandb
def test_nothing_begins_before_the_first_write(tmp_path):
    writer = WandbWriter(tmp_path)
    with EventStorage():
        writer.write()
    writer.close()

    assert list(tmp_path.iterdir()) == []


@needs_wandb
def test_rows_have_the_iteration_as_step_and_nothing_that_comes_late_is_lost(tmp_path):
    writer = WandbWriter(tmp_path, window_size=3, id="abc", config={"SOLVER": {"BASE_LR": 0.1}})
    with EventStorage() as storage:
        for storage.iter, loss in enumerate([9.0, 1.0, 8.0, 2.5]):
            storage.put_scalar("loss", loss)
        writer.write()
        storage.put_scalar("late", 0.25, cur_iter=1)
        storage.put_scalar("top1", 50.0, epoch=2)
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
        {"_step": 5, "iteration": 3, "epoch": 2, "top1": 50.0},
        {"_step": 9, "iteration": 9, "bad": pytest.approx(math.nan, nan_ok=True), "high": math.inf},
    ]
    assert run["axes"] == {"*": "iteration", "top1": "epoch"}
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
def test_a_second_training_goes_on_in_the_same_run_behind_the_first(tmp_path):
    writer = WandbWriter(tmp_path)
    for value in (1.0, 2.0):
        write(writer, 0, a=value)
        writer.close()
    writer.close()  # harmless

    first, second = finished_runs(tmp_path)
    assert first["file"] == second["file"]
    assert rows(first) + rows(second) == [{"_step": i, "iteration": 0, "a": i + 1} for i in range(2)]


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


@needs_wandb
def test_two_runs_have_two_ids_which_are_in_the_state_before_the_first_write(tmp_path, monkeypatch):
    ids = [WandbWriter(tmp_path).state_dict()["run_id"] for _ in range(2)]
    monkeypatch.setenv("WANDB_RUN_ID", "of_a_sweep")

    assert len({*ids}) == 2
    assert WandbWriter(tmp_path).state_dict()["run_id"] == "of_a_sweep"


@needs_wandb
def test_it_leaves_random_numbers_environment_and_a_run_of_the_users_own_alone(tmp_path):
    wandb = importlib.import_module("wandb")
    own = wandb.init(dir=tmp_path / "own", settings={"silent": True})
    before = dict(os.environ), random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    writer = WandbWriter(tmp_path)
    write(writer, 0, loss=1.0)
    writer.close()

    assert before == (
        dict(os.environ), random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    )  # fmt: skip
    assert wandb.run is own
    own.log({"mine": 1.0})
    own.finish()
    [run] = finished_runs(tmp_path)
    assert rows(run) == [{"_step": 0, "iteration": 0, "loss": 1}]


# ---------------------------------------------------------------------- what goes wrong


class Broken:
    """Stands for the module wandb."""

    def __init__(self, error):
        self.error, self.disabled, self.calls = error, False, []

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
    assert caplog.messages == [
        "Nothing more is written for Weights & Biases, training continues: no answer",
        "The run of Weights & Biases could not be finished: no answer",
    ]
    wandb.error = None
    write(writer, 4, loss=1.0)
    assert wandb.calls == [0, -1, 4]


def test_a_disk_that_is_full_is_an_os_error_and_the_rows_are_written_later(tmp_path, broken):
    wandb = broken(OSError(28, "No space left on device"))
    writer = WandbWriter(tmp_path)
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        with pytest.raises(OSError, match="No space left on device"):
            writer.write()
        wandb.error = None
        writer.write()
        writer.close()

    assert wandb.calls == [0, 0, -1]


def test_a_mode_in_which_nothing_is_kept_is_said(tmp_path, broken, caplog):
    broken(None).disabled = True
    writer = WandbWriter(tmp_path)
    write(writer, 0, loss=1.0)
    write(writer, 1, loss=1.0)

    assert caplog.messages == ["Nothing is written for Weights & Biases, because of WANDB_MODE or a missing login"]


# ---------------------------------------------------------------------- a training

JOB = """
import os, pathlib, signal, sys
import torch
from tests.engine.tiny import Weight, sgd
from trainkit.projects.loggers.tests.wandb_file import wait_for
from trainkit.engine import SimpleTrainer, hooks
from trainkit.utils.events import WandbWriter

model = Weight()
loader = torch.utils.data.DataLoader(torch.zeros(99), batch_size=None, num_workers=1, multiprocessing_context="fork")
trainer = SimpleTrainer(model, loader, sgd(model), async_write_metrics=True)
writer = hooks.PeriodicWriter([WandbWriter("out", window_size=1)], period=2)


class Kill(hooks.HookBase):
    def after_step(self):
        if self.trainer.iter == 6:
            torch.save(writer.state_dict(), "state.pth")
        if self.trainer.iter == 8:
            self.trainer.storage.flush()
            wait_for(lambda runs: [row["_step"] for row in runs[0]["rows"]][-1:] == [7], pathlib.Path("out"))
            os.kill(os.getpid(), signal.SIGKILL)


if os.path.exists("state.pth"):
    writer.load_state_dict(torch.load("state.pth", weights_only=True))
    trainer.register_hooks([writer])
    trainer.train(7, 10)
    trainer.train(10, 12)
else:
    trainer.register_hooks([Kill(), writer])
    trainer.train(0, 10)
"""


@pytest.fixture
def short_folder():
    """The path of a socket takes 107 characters; in a longer TMPDIR workers cannot send what they have loaded."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@needs_wandb
def test_a_run_that_is_killed_goes_on_in_its_run_and_touches_nothing_but_its_folder(tmp_path, short_folder):
    places = {name: tmp_path / name.lower() for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    for place in places.values():
        place.mkdir()
    places["TMPDIR"] = short_folder
    environment = {**os.environ, **{name: str(place) for name, place in places.items()}, "PYTHONPATH": str(ROOT)}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(short_folder), "PYTHONWARNINGS": "error"}

    def run():
        """Exit code and output; not over a pipe, which what a kill leaves behind may hold open for minutes."""
        with (places["TMPDIR"] / "printed").open("w+") as file:
            command = [sys.executable, "-c", JOB]
            done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=file, stderr=file, timeout=100)
            file.seek(0)
            return done.returncode, file.read()

    assert run()[0] == -signal.SIGKILL
    code, said = run()
    assert (code, "wandb" in said.lower()) == (0, False)
    killed, *later = read_runs(tmp_path / "out")
    assert {part["file"] for part in later} == {killed["file"]}
    assert [[row["_step"] for row in part["rows"]] for part in (killed, *later)] == [[1, 3, 5, 7], [7, 9], [11]]
    assert killed["exit"] is None
    assert [part["exit"] for part in later] == [0, 0]
    del places["TMPDIR"]
    assert [path for place in places.values() for path in place.rglob("*")] == []
    assert {path.name for path in tmp_path.iterdir()} == {"out", "state.pth", *(p.name for p in places.values())}


@needs_wandb
def test_after_the_begin_of_training_a_write_imports_nothing(tmp_path):
    by_begin, by_writing = imported_by_writing("WandbWriter('started')", tmp_path, started=True)
    assert {"wandb", "PIL.Image"} < {*by_begin}
    assert by_writing == []
