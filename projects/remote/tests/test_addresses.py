"""Weights at an address of fsspec, here of a store in memory."""

import pickle

import numpy
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from trainkit.projects.remote.store import register_addresses

from tests.engine.job import tiny_cfg
from tools.convert_checkpoint import convert
from trainkit.checkpoint import CheckpointError
from trainkit.engine import DefaultPredictor, DefaultTrainer
from trainkit.utils.file_io import PathManager


@pytest.fixture
def on(tmp_path, monkeypatch):
    """Go to a machine with this name, whose local folders are empty at first."""
    register_addresses()
    MemoryFileSystem.store.clear()
    return lambda name: monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / name))


def test_weights_at_an_address_are_loaded_and_downloaded_again_when_they_have_changed(on, tmp_path):
    on("a")
    weights = DefaultTrainer(tiny_cfg(tmp_path)).model.state_dict()
    for value in (1.0, 2.0):
        torch.save({name: torch.full_like(weight, value) for name, weight in weights.items()}, tmp_path / "weights.pth")
        PathManager.copy_from_local(str(tmp_path / "weights.pth"), "memory://bucket/weights.pth")
        cfg = tiny_cfg(tmp_path, "MODEL.WEIGHTS", "memory://bucket/weights.pth")
        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load(resume=False)
        for model in (trainer.model, DefaultPredictor(cfg).model):
            assert torch.equal(model.layers[0].bias, torch.full((8,), value))


def test_a_pickle_is_converted_from_an_address_to_another_one(on):
    on("a")
    MemoryFileSystem().pipe_file("/bucket/x.pkl", pickle.dumps({"weight": numpy.ones(3, numpy.float32)}))
    assert convert("memory://bucket/x.pkl", "memory://bucket/x.pth") == []
    assert torch.equal(torch.load(PathManager.get_local_path("memory://bucket/x.pth"))["weight"], torch.ones(3))
    with pytest.raises(CheckpointError, match="'s3://bucket/x.pth' cannot be written: Install s3fs"):
        convert("memory://bucket/x.pkl", "s3://bucket/x.pth")
