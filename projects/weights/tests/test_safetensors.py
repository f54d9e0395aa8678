"""Weights in files of safetensors."""

import pytest
import torch

from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint.format import make_format

pytest.importorskip("safetensors")


def tied():
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
    )
    model[1].weight = model[0].weight
    model[1].bias.data = torch.arange(4.0)[::2]  # not contiguous
    return model


@pytest.fixture
def path(tmp_path):
    """A file with the weights of a model in which two layers share one."""
    make_format("safetensors").write(
        {"model": tied().state_dict()}, str(tmp_path / "model.safetensors")
    )
    return tmp_path / "model.safetensors"


def test_a_model_loads_them(path):
    model, held = tied(), make_format("safetensors").read(str(path))["model"]
    Checkpointer(model).resume_or_load(path)
    assert model.state_dict().keys() == held.keys()
    assert all(torch.equal(value, held[name]) for name, value in model.state_dict().items())


def test_a_damaged_file_is_an_error(path):
    content = path.read_bytes()
    for damaged in (content[:-3], b"x" * 50):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot be read as safetensors: "):
            Checkpointer(tied()).load(path)
    with pytest.raises(CheckpointError, match="No such file"):
        Checkpointer(tied()).load(path.parent / "absent.safetensors")


def test_the_package_is_asked_for(path, without_safetensors):
    with pytest.raises(
        CheckpointError,
        match=r"needs the package safetensors: pip install 'trainkit\[safetensors\]'",
    ):
        Checkpointer(tied()).load(path)
