"""Checkpointers that convert foreign weights, in the manner of Mask2Former, unbiased-teacher and others."""

import logging
import pickle
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from tests.checkpoint.conftest import Counter, linear, weight_of
from tests.engine.job import tiny_cfg
from trainkit.checkpoint import Checkpointer, CheckpointError, load_trusted_pickle
from trainkit.engine import DefaultTrainer
from trainkit.utils.file_io import PathHandler, PathManager


def arrays(fill, prefix=""):
    return {f"{prefix}weight": np.full((2, 2), fill, np.float32), f"{prefix}bias": np.full(2, fill, np.float32)}


@pytest.fixture
def zoo_file(tmp_path):
    """Weights as in a model zoo: numpy arrays under other names, in a pickle."""
    path = tmp_path / "zoo.pkl"
    path.write_bytes(pickle.dumps({"model": arrays(3, "backbone."), "__author__": "a zoo"}))
    return str(path)


class Converting(Checkpointer):
    """Reads the pickles of a zoo, which it trusts, and renames their weights."""

    def _load_file(self, filename):
        if not filename.endswith(".pkl"):
            return super()._load_file(filename)
        loaded = load_trusted_pickle(filename)
        loaded["model"] = {name.removeprefix("backbone."): value for name, value in loaded["model"].items()}
        return loaded


def test_a_pickle_is_refused_unless_a_subclass_reads_it(zoo_file):
    model = linear(0)
    with pytest.raises(CheckpointError, match="not a file of torch.save: "):
        Checkpointer(model).load(zoo_file)
    assert weight_of(model) == 0
    assert Converting(model).load(zoo_file) == {"__author__": "a zoo"}
    assert weight_of(model) == 3


@pytest.mark.parametrize("resume", [False, True])
def test_an_overridden_load_file_reads_the_first_weights_and_the_checkpoints_of_the_run(zoo_file, tmp_path, resume):
    read = []

    class Noting(Converting):
        def _load_file(self, filename):
            read.append(filename)
            return super()._load_file(filename)

    if resume:
        Checkpointer(linear(5), tmp_path, counter=Counter(7)).save("model_final", iteration=9)
    model, counter = linear(0), Counter()
    rest = Noting(model, tmp_path, counter=counter).resume_or_load(zoo_file, resume=True)
    assert (weight_of(model), counter.value) == ((5, 7) if resume else (3, 0))
    assert rest == ({"iteration": 9} if resume else {"__author__": "a zoo"})
    assert read == [str(tmp_path / "model_final.pth") if resume else zoo_file]


class Filtering(Checkpointer):
    """Gives the model a new prefix, and says nothing of keys that are expected to be missing."""

    def _load_model(self, checkpoint):
        self.seen = sorted(checkpoint)
        weights = checkpoint["model"]
        checkpoint["model"] = {name.replace("encoder", "backbone"): value for name, value in weights.items()}
        incompatible = super()._load_model(checkpoint)
        incompatible.missing_keys.remove("head.bias")
        incompatible.unexpected_keys[:] = []
        return incompatible

    def _log_incompatible_keys(self, incompatible):
        self.logged = incompatible
        super()._log_incompatible_keys(incompatible)


def test_an_overridden_load_model_gets_the_checkpoint_and_gives_the_keys_that_do_not_fit(tmp_path, caplog):
    model = nn.ModuleDict({"backbone": linear(0), "head": linear(0)})
    weights = {"encoder.weight": torch.ones(2, 2), "encoder.bias": torch.ones(3), "extra": torch.ones(1)}
    torch.save({"model": weights, "head": 1}, tmp_path / "other.pth")
    checkpointer = Filtering(model)
    assert checkpointer.load(tmp_path / "other.pth") == {"head": 1}
    assert checkpointer.seen == ["head", "model"]
    assert weight_of(model["backbone"]) == 1
    assert checkpointer.logged.missing_keys == ["head.weight"]
    assert checkpointer.logged.incorrect_shapes == [("backbone.bias", (3,), (2,))]
    table = caplog.messages[-1]
    assert "missing     head.weight    -                    [2, 2]" in table
    assert "mismatched  backbone.bias  [3]                  [2]" in table
    assert "head.bias" not in table
    assert "extra" not in table


class Incompatible(NamedTuple):
    missing_keys: list
    unexpected_keys: list
    incorrect_shapes: list


class StudentOnly(Checkpointer):
    """Loads into a part of the model by itself."""

    result: object = None

    def _load_model(self, checkpoint):
        weights = checkpoint.pop("model")
        self.logger.info("the student has %d weights", len(weights))
        self._convert_ndarray_to_tensor(weights)
        self.model["student"].load_state_dict(weights, strict=False)
        return self.result


def test_a_load_model_of_its_own_may_return_fvcores_tuple_torchs_or_none(tmp_path, caplog):
    model = nn.ModuleDict({"student": linear(0), "teacher": linear(0)})
    path = tmp_path / "x.pth"
    torch.save({"model": dict(linear(4).state_dict())}, path)
    with caplog.at_level("INFO"):
        StudentOnly(model).load(path)
    assert ("trainkit.checkpoint.checkpointer", logging.INFO, "the student has 2 weights") in caplog.record_tuples
    assert (weight_of(model["student"]), weight_of(model["teacher"])) == (4, 0)
    assert not [message for message in caplog.messages if "do not fit" in message]

    checkpointer = StudentOnly(model)
    checkpointer.result = Incompatible(["a"], ["b"], [("c", (1,), (2, 3))])
    checkpointer.load(path)
    rows = [line.split() for line in caplog.messages[-1].splitlines()]
    assert ["missing", "a", "-"] in rows
    assert ["unexpected", "b", "-"] in rows
    assert ["mismatched", "c", "[1]", "[2,", "3]"] in rows

    checkpointer.result = model["student"].load_state_dict({"weight": torch.ones(2, 2)}, strict=False)
    checkpointer.load(path)
    assert "missing  bias" in caplog.messages[-1]


def test_load_model_can_be_called_with_a_dict_of_ones_own():
    model = linear(0)
    incompatible = Checkpointer(model)._load_model({"model": arrays(2, "module.")})
    assert not incompatible
    assert weight_of(model) == 2
    with pytest.raises(CheckpointError, match="'the checkpoint' holds another model"):
        Checkpointer(model)._load_model({"model": arrays(2, "other.")})


def test_an_overridden_conversion_of_arrays_is_called(tmp_path):
    class Halving(Checkpointer):
        def _convert_ndarray_to_tensor(self, state_dict):
            super()._convert_ndarray_to_tensor(state_dict)
            for name, value in state_dict.items():
                state_dict[name] = value / 2

    model = linear(0)
    torch.save({"model": dict(linear(6).state_dict())}, tmp_path / "x.pth")
    Halving(model).load(tmp_path / "x.pth")
    assert weight_of(model) == 3


@pytest.mark.parametrize("call", ["load", "resume_or_load"])
def test_an_address_is_loaded_by_the_path_manager(tmp_path, call):
    class Zoo(PathHandler):
        def _get_supported_prefixes(self):
            return ["zoo://"]

        def _get_local_path(self, path, **kwargs):
            return str(tmp_path / path.removeprefix("zoo://"))

    torch.save({"model": dict(linear(6).state_dict())}, tmp_path / "x.pth")
    model = linear(0)
    checkpointer = Checkpointer(model)
    assert checkpointer.path_manager is PathManager
    checkpointer.path_manager = type(PathManager)()
    checkpointer.path_manager.register_handler(Zoo())
    getattr(checkpointer, call)("zoo://x.pth")
    assert weight_of(model) == 6
    with pytest.raises(CheckpointError, match="cannot read .*y.pth': No such file"):
        getattr(checkpointer, call)("zoo://y.pth")


def test_a_trainer_whose_checkpointer_converts_trains_saves_and_resumes(tmp_path):
    class Trainer(DefaultTrainer):
        def __init__(self, cfg):
            super().__init__(cfg)
            old = self.checkpointer
            self.checkpointer = Converting(self._trainer.model, cfg.OUTPUT_DIR, **old.checkpointables)

    def run(folder, max_iter, resume):
        trainer = Trainer(tiny_cfg(folder, "SOLVER.MAX_ITER", max_iter))
        weights = {f"backbone.{k}": v.numpy() for k, v in trainer.model.state_dict().items()}
        weights["backbone.layers.0.bias"] = np.full(8, 9, np.float32)
        (tmp_path / "zoo.pkl").write_bytes(pickle.dumps({"model": weights}))
        trainer.checkpointer.resume_or_load(str(tmp_path / "zoo.pkl"), resume=False)
        assert trainer.model.layers[0].bias.eq(9).all()
        trainer.resume_or_load(resume=resume)
        trainer.train()
        return trainer.model.state_dict()

    torch.manual_seed(3)
    whole = run(tmp_path / "whole", 10, False)
    torch.manual_seed(3)
    run(tmp_path / "parts", 5, False)
    torch.manual_seed(4)
    resumed = run(tmp_path / "parts", 10, True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
