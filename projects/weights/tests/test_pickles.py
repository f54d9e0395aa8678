"""Pickles of other programs that are trusted."""

import pickle

import numpy as np
import pytest
import torch

from tests.checkpoint.conftest import linear, weight_of
from tools import convert_checkpoint
from trainkit.checkpoint import Checkpointer, load_trusted_pickle


class Settings:
    """A class of the other program."""


@pytest.mark.parametrize("form", ["pickle", "archive", "legacy"])
def test_a_trusted_pickle_is_read_in_each_form(tmp_path, form):
    state, path = {"model": {"weight": torch.ones(2)}, "args": Settings()}, tmp_path / "x.pkl"
    if form == "pickle":
        state["model"] = {"weight": np.ones(2)}
        path.write_bytes(pickle.dumps(state))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "archive")
    loaded = load_trusted_pickle(path)
    assert isinstance(loaded["args"], Settings)
    assert loaded["model"]["weight"].tolist() == [1, 1]


def test_the_tool_writes_a_checkpoint_that_anybody_can_load(tmp_path, capsys):
    source, target = tmp_path / "in.pkl", tmp_path / "out.pth"
    model = {"weight": np.full((2, 2), 3, ">f4")[::-1], "bias": np.full(2, 3, np.float32)}
    state = {"model": model, "iteration": np.int64(9), "betas": (0.9, np.float64(0.5)), "args": Settings()}
    source.write_bytes(pickle.dumps(state))
    convert_checkpoint.main(convert_checkpoint.parse_args([str(source), str(target)]))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"Code from {source} is run."
    assert said[1].startswith("Left out: the state at 'args' is <")
    assert said[2:] == [f"Wrote {target}."]
    loaded = linear(0)
    assert Checkpointer(loaded).load(target) == {"iteration": 9, "betas": (0.9, 0.5)}
    assert weight_of(loaded) == 3
