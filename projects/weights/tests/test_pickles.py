"""Pickles of other programs that are trusted."""

import pickle

import numpy as np
import pytest
import torch

from tests.checkpoint.conftest import linear, weight_of
from tools import convert_checkpoint
from trainkit.checkpoint import Checkpointer, CheckpointError, load_trusted_pickle


class Settings:
    """A class of the other program."""


def test_a_trusted_pickle_is_read_in_each_form(tmp_path):
    state = {"model": {"weight": torch.ones(2)}, "args": Settings()}
    torch.save(state, tmp_path / "archive.pkl")
    torch.save(state, tmp_path / "legacy.pkl", _use_new_zipfile_serialization=False)
    (tmp_path / "pickle.pkl").write_bytes(pickle.dumps({**state, "model": {"weight": np.ones(2)}}))
    for path in tmp_path.iterdir():
        loaded = load_trusted_pickle(path)
        assert isinstance(loaded["args"], Settings)
        assert loaded["model"]["weight"].tolist() == [1, 1]
    torch.save(linear(1), tmp_path / "module.pkl")
    with pytest.raises(
        CheckpointError, match=r"holds a Linear; save a dict, of a module its state_dict\(\)"
    ):
        load_trusted_pickle(tmp_path / "module.pkl")


def test_the_tool_writes_a_checkpoint_that_anybody_can_load(tmp_path, capsys):
    source, target = tmp_path / "in.pkl", tmp_path / "out.pth"
    model = {"weight": np.full((2, 2), 3, ">f4")[::-1], "bias": np.full(2, 3, np.float32)}
    state = {
        "model": model,
        "iteration": np.int64(9),
        "betas": (0.9, np.float64(0.5)),
        "args": Settings(),
    }
    source.write_bytes(pickle.dumps(state))
    convert_checkpoint.main(convert_checkpoint.parse_args([str(source), str(target)]))
    assert "Left out: the state at 'args' is <" in capsys.readouterr().out
    loaded = linear(0)
    assert Checkpointer(loaded).load(target) == {"iteration": 9, "betas": (0.9, 0.5)}
    assert weight_of(loaded) == 3
