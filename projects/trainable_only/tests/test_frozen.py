"""A run whose checkpoints leave out frozen parameters ends with the same bits, and notices another base."""

import pytest
import torch
from torch import nn
from trainkit.projects.trainable_only.frozen import FrozenWeights

from tests.checkpoint.conftest import Counter
from tests.engine.job import tiny_cfg
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint.file import read_file
from trainkit.engine import DefaultTrainer


def adapted(fill):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    for parameter in model.parameters():
        nn.init.constant_(parameter, fill)
    model[0].requires_grad_(False)
    return model


def save(folder):
    torch.save(adapted(1).state_dict(), folder / "base.pth")
    model = adapted(1)
    nn.init.constant_(model[2].weight, 5)
    Checkpointer(model, folder / "run", frozen=FrozenWeights(model=model), state=Counter(3)).save("model")


def test_frozen_parameters_are_left_out_and_come_from_the_file(tmp_path):
    save(tmp_path)
    held = read_file(tmp_path / "run/model.pth")
    assert {name.split(".")[0] for name in held["model"]} == {"1", "2"}
    assert held["model"]._metadata["1"] == {"version": 2}
    model, state = adapted(7), Counter()
    frozen = FrozenWeights(str(tmp_path / "base.pth"), model)
    assert Checkpointer(model, tmp_path / "run", frozen=frozen, state=state).resume_or_load("") == {}
    assert [model[i].weight.unique().item() for i in (0, 2)] == [1, 5]
    assert state.value == 3
    frozen.before_save(again := {"model": model.state_dict()})
    assert again["frozen_digests"] == held["frozen_digests"]


def test_other_frozen_parameters_are_an_error(tmp_path):
    save(tmp_path)
    model = adapted(7)
    checkpointer = Checkpointer(model, tmp_path / "run", frozen=FrozenWeights(model=model), state=Counter())
    with pytest.raises(CheckpointError, match=r"2 frozen parameters, such as '0\.(weight|bias)', differ"):
        checkpointer.resume_or_load("")
    assert model[2].weight.unique().item() == 7


def test_a_job_with_the_key_resumes_exactly(tmp_path):
    class Trainer(DefaultTrainer):
        @classmethod
        def build_model(cls, cfg):
            model = super().build_model(cfg)
            next(model.parameters()).requires_grad_(False)
            return model

    def train(folder, max_iter=None):
        options = ("CHECKPOINT.TRAINABLE_ONLY", True, "MODEL.WEIGHTS", str(tmp_path / "base.pth"))
        torch.manual_seed(3)
        trainer = Trainer(tiny_cfg(tmp_path / folder, *options))
        trainer.resume_or_load()
        trainer.train(max_iter=max_iter)
        return trainer.model.state_dict()

    torch.save(Trainer(tiny_cfg(tmp_path / "base")).model.state_dict(), tmp_path / "base.pth")
    whole = train("whole")
    train("parts", 5)
    parts = train("parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert read_file(tmp_path / "parts/model_final.pth")["model"].keys() < whole.keys()
