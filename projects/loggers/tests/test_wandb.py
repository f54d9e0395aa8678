"""Weights & Biases in offline mode, with the real package; what it has written is read back."""

import importlib
import importlib.util
import math
import os
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from trainkit.projects.loggers.tests.wandb_file import read_runs

from tests.docs.pages import blocks, run
from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError
from trainkit.engine import default_writers
from trainkit.utils.events import CSVWriter, EventStorage, WandbWriter


def needs_wandb(test):
    """wandb starts a process for each run."""
    return pytest.mark.slow(
        pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")(test)
    )


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    if "wandb" in sys.modules:  # another test may have started it, with other settings
        sys.modules["wandb"].teardown()
    monkeypatch.chdir(tmp_path)


def write(writer, iter, **scalars):
    with EventStorage(iter) as storage:
        for name, value in scalars.items():
            storage.put_scalar(name, value, smoothing_hint=False)
        writer.write()


@needs_wandb
def test_each_new_scalar_image_and_histogram_arrives_once_with_its_iteration(tmp_path):
    from PIL import Image

    writer = WandbWriter(tmp_path, window_size=3, id="abc", config={"SOLVER": {"BASE_LR": 0.1}})
    rgb = torch.arange(24, dtype=torch.uint8).reshape(3, 2, 4)
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
        storage.put_image("rgb", rgb)
        storage.put_image("gray", torch.tensor([[[0.0, 0.5, 2.0]]]))
        storage.put_histogram("few", torch.arange(6.0), bins=2)
        storage.put_histogram("many", torch.arange(1001.0), bins=1000)
        writer.write()
        assert storage.images() == []
        assert storage.histograms() == []
        writer.close()

    [run] = read_runs(tmp_path)
    *rows, pictures = run["rows"]
    assert rows == [
        {"_step": 3, "iteration": 3, "loss": 2.5},
        {"_step": 4, "iteration": 1, "late": 0.25},
        {"_step": 5, "iteration": 3, "top1": 50.0},
        {"_step": 9, "iteration": 9, "bad": pytest.approx(math.nan, nan_ok=True), "high": math.inf},
    ]
    assert pictures["_step"] == 10
    assert pictures["iteration"] == 9
    assert pictures["few/values"] == [3, 3]
    assert pictures["few/bins"] == [0, 2.5, 5]
    assert pictures["many/values"] == [2] * 499 + [3]
    assert pictures["many/bins"] == [*range(0, 1001, 2)]
    [folder] = (tmp_path / "wandb").glob("offline-run-*/files")
    assert np.array_equal(Image.open(folder / pictures["rgb/path"]), rgb.permute(1, 2, 0).numpy())
    assert np.array_equal(Image.open(folder / pictures["gray/path"]), [[0, 127, 255]])
    assert run["file"] == "run-abc"
    assert run["exit"] == 0
    assert run["axes"] == {"*": "iteration"}
    assert run["config"]["SOLVER"] == {"BASE_LR": 0.1}


@needs_wandb
def test_a_resumed_run_repeats_the_steps_after_the_checkpoint_in_the_same_run(tmp_path):
    first = WandbWriter(tmp_path, id="a")
    write(first, 3, loss=1.0, top1=2.0)
    torch.save(first.state_dict(), tmp_path / "state.pth")
    write(first, 3, late=0.5)
    write(first, 7, loss=3.0)
    first.close()

    second = WandbWriter(tmp_path / "second", id="b")  # wandb names a folder by the second
    second.load_state_dict(torch.load(tmp_path / "state.pth", weights_only=True))
    write(second, 3, late=0.5)
    write(second, 7, loss=3.0)
    second.close()

    [killed], [resumed] = read_runs(tmp_path), read_runs(tmp_path / "second")
    assert killed["file"] == resumed["file"] == "run-a"
    assert [row["_step"] for row in killed["rows"]] == [3, 4, 7]
    assert killed["rows"][1:] == resumed["rows"]


def test_an_error_of_wandb_is_logged_and_nothing_more_is_written_in_this_training(
    tmp_path, monkeypatch, caplog
):
    wandb, real = Mock(), importlib.import_module
    run = wandb.init.return_value
    run.disabled = False
    run.log.side_effect = run.finish.side_effect = RuntimeError("no answer")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr(
        "importlib.import_module", lambda name: wandb if name == "wandb" else real(name)
    )
    writer = WandbWriter(tmp_path)
    for iter in range(3):
        write(writer, iter, loss=1.0)
    writer.close()

    run.log.assert_called_once()
    run.finish.assert_called_once()
    first, second = caplog.messages
    assert first == second
    assert "Weights & Biases" in first
    assert first.endswith(": no answer")
    run.log.side_effect = None
    write(writer, 4, loss=1.0)
    assert [call.kwargs["step"] for call in run.log.call_args_list] == [0, 4]


def test_the_writers_are_there_by_name_and_a_missing_package_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    writers = default_writers(tmp_path, names=["csv", "wandb"], cfg=tiny_cfg(tmp_path))
    assert [type(writer) for writer in writers] == [CSVWriter, WandbWriter]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"WandbWriter needs the package wandb: pip install 'trainkit\[wandb\]'"
    ):
        default_writers(tmp_path, names=["wandb"])


(OF_PAGE,) = blocks("projects/loggers/README.md", "python")


@needs_wandb
@pytest.mark.parametrize("at_start", [False, True])  # True: two rows for iteration 0
def test_the_trainer_of_the_page_shows_its_settings_and_texts_of_a_hook(tmp_path, at_start):
    names = run(OF_PAGE, "loggers/README.md")
    cfg = tiny_cfg(tmp_path, "SOLVER.MAX_ITER", 110, "SOLVER.BASE_LR", 0.25, "LOG.PERIOD", 1)
    cfg.merge_from_list(["TEST.EVAL_PERIOD", 0, "TEST.EVAL_AT_START", at_start])
    trainer = names["Trainer"](cfg)
    trainer.register_hooks([names["ShowText"]()])
    trainer.train()
    [found] = read_runs(tmp_path)
    assert "0.25" in repr(found["config"]["SOLVER"])
    texts = [row for row in found["rows"] if row.get("sample/_type") == "html-file"]
    assert [row["iteration"] for row in texts] == [49, 99]
    losses = [row["iteration"] for row in found["rows"] if "total_loss" in row]
    assert losses == [*range(110)]
