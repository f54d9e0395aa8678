"""DefaultPredictor with averaged weights; without, see test_defaults.py."""

import logging

import pytest
import torch

from tests.engine.job import TinyClassifier, tiny_cfg
from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.file import read_file
from trainkit.data import DatasetCatalog
from trainkit.engine import DefaultPredictor, DefaultTrainer

EMA = {"NAME": "EMAHook", "DECAY": 0.5}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("trained")
    DefaultTrainer(tiny_cfg(output_dir, "HOOKS", [EMA])).train()
    return output_dir / "model_final.pth"


def expected(weights):
    model = TinyClassifier(None).eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        return model({"x": torch.stack([sample["x"] / 2 for sample in DatasetCatalog.get("tiny_test")])})


def predicted(cfg):
    return torch.stack(DefaultPredictor(cfg)(DatasetCatalog.get("tiny_test")))


@pytest.mark.parametrize(
    ("hooks", "averaged"),
    [
        ([EMA], True),
        ([{**EMA, "EVALUATE": "both"}], True),
        ([{**EMA, "EVALUATE": "raw"}], False),
        ([{**EMA, "ENABLED": False}], False),
        ([{"NAME": "TorchMemoryStats"}], False),
        ([], False),
    ],
    ids=str,
)
def test_the_weights_are_those_that_the_config_evaluates(trained, tmp_path, hooks, averaged, caplog):
    state = read_file(trained)
    average = state["trainer"]["hooks"]["EMAHook"]["model"]
    right, wrong = (average, state["model"]) if averaged else (state["model"], average)
    found = predicted(tiny_cfg(tmp_path, "MODEL.WEIGHTS", str(trained), "HOOKS", hooks))
    assert torch.equal(found, expected(right))
    assert not torch.allclose(found, expected(wrong))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_weights_without_an_average_are_used_with_one_warning(trained, tmp_path, caplog):
    weights = read_file(trained)["model"]
    torch.save({"model": weights}, tmp_path / "published.pth")
    found = predicted(tiny_cfg(tmp_path, "MODEL.WEIGHTS", str(tmp_path / "published.pth"), "HOOKS", [EMA]))
    assert torch.equal(found, expected(weights))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "MODEL.WEIGHTS holds no averaged weights of an EMAHook; predicting with the model's"
    ]


def test_averaged_weights_of_another_model_are_an_error_like_any_others(trained, tmp_path):
    state = {"model": {"a": torch.ones(1)}, "trainer": {"hooks": {"EMAHook": {"model": {"a": torch.ones(1)}}}}}
    torch.save(state, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match="holds another model than this one"):
        predicted(tiny_cfg(tmp_path, "MODEL.WEIGHTS", str(tmp_path / "other.pth"), "HOOKS", [EMA]))
