"""Checkpointers that convert foreign weights, in the manner of Mask2Former, unbiased-teacher and others."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn

from tests.checkpoint.conftest import Counter, linear, weight_of
from trainkit.checkpoint import Checkpointer, CheckpointError, load_trusted_pickle
from trainkit.utils.file_io import PathHandler, PathManager


@pytest.fixture
def zoo_file(tmp_path):
    """Weights as in a model zoo: numpy arrays under other names, in a pickle."""
    arrays = {
        "backbone.weight": np.full((2, 2), 3, np.float32),
        "backbone.bias": np.full(2, 3, np.float32),
    }
    path = tmp_path / "zoo.pkl"
    path.write_bytes(pickle.dumps({"model": arrays, "__author__": "a zoo"}))
    return str(path)


class Converting(Checkpointer):
    """Reads the pickles of a zoo, which it trusts, and renames their weights."""

    def _load_file(self, filename):
        if not filename.endswith(".pkl"):
            return super()._load_file(filename)
        loaded = load_trusted_pickle(filename)
        loaded["model"] = {
            name.removeprefix("backbone."): value for name, value in loaded["model"].items()
        }
        return loaded


@pytest.mark.parametrize("resume", [False, True])
def test_an_overridden_load_file_reads_the_first_weights_and_the_checkpoints_of_the_run(
    zoo_file, tmp_path, resume
):
    read = []

    class Noting(Converting):
        def _load_file(self, filename):
            read.append(filename)
            return super()._load_file(filename)

    with pytest.raises(CheckpointError, match="not a file of torch.save: "):
        Checkpointer(linear(0)).load(zoo_file)
    if resume:
        Checkpointer(linear(5), tmp_path, counter=Counter(7)).save("model_final", iteration=9)
    model, counter = linear(0), Counter()
    rest = Noting(model, tmp_path, counter=counter).resume_or_load(zoo_file, resume=True)
    if resume:
        assert weight_of(model) == 5
        assert counter.value == 7
        assert rest == {"iteration": 9}
        assert read == [str(tmp_path / "model_final.pth")]
    else:
        assert weight_of(model) == 3
        assert counter.value == 0
        assert rest == {"__author__": "a zoo"}
        assert read == [zoo_file]


class Filtering(Checkpointer):
    """Gives the model a new prefix, and says nothing of keys that are expected to be missing."""

    def _load_model(self, checkpoint):
        weights = checkpoint["model"]
        checkpoint["model"] = {
            name.replace("encoder", "backbone"): value for name, value in weights.items()
        }
        incompatible = super()._load_model(checkpoint)
        incompatible.missing_keys.remove("head.bias")
        incompatible.unexpected_keys[:] = []
        return incompatible

    def _log_incompatible_keys(self, incompatible):
        self.logged = incompatible
        super()._log_incompatible_keys(incompatible)


def test_an_overridden_load_model_gets_the_checkpoint_and_gives_the_keys_that_do_not_fit(
    tmp_path, caplog
):
    model = nn.ModuleDict({"backbone": linear(0), "head": linear(0)})
    weights = {
        "encoder.weight": torch.ones(2, 2),
        "encoder.bias": torch.ones(3),
        "extra": torch.ones(1),
    }
    torch.save({"model": weights, "head": 1}, tmp_path / "other.pth")
    checkpointer = Filtering(model)
    assert checkpointer.load(tmp_path / "other.pth") == {"head": 1}
    assert weight_of(model["backbone"]) == 1
    assert checkpointer.logged.missing_keys == ["backbone.bias", "head.weight"]
    assert checkpointer.logged.incorrect_shapes == [("backbone.bias", (3,), (2,))]
    assert "'backbone.bias'" in caplog.messages[-2]


def test_an_address_is_loaded_by_the_path_manager(tmp_path):
    class Zoo(PathHandler):
        def _get_supported_prefixes(self):
            return ["zoo://"]

        def _get_local_path(self, path, **kwargs):
            return str(tmp_path / path.removeprefix("zoo://"))

    torch.save({"model": dict(linear(6).state_dict())}, tmp_path / "x.pth")
    model = linear(0)
    checkpointer = Checkpointer(model)
    checkpointer.path_manager = type(PathManager)()
    checkpointer.path_manager.register_handler(Zoo())
    checkpointer.resume_or_load("zoo://x.pth")
    assert weight_of(model) == 6
    with pytest.raises(CheckpointError, match="cannot read .*y.pth': No such file"):
        checkpointer.load("zoo://y.pth")
