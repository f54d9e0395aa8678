"""The state of an optimizer goes into one of its kind only."""

import pytest
import torch
from torch import nn

from trainkit.config import ConfigError
from trainkit.engine.step import SimpleTrainer


class Model(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()


def trainer_of(make):
    torch.manual_seed(0)
    model = Model(2, 1)
    return SimpleTrainer(model, [torch.ones(3, 2)], make(model.parameters()))


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def sgd_of_two_groups(params):
    return torch.optim.SGD([{"params": [param]} for param in params], lr=0.1, momentum=0.9)


def state_of(make):
    trainer = trainer_of(make)
    trainer.train(0, 2)
    return trainer.state_dict()


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        (sgd, torch.optim.AdamW, "checkpoint has .*'momentum'.*, this one .*'betas'"),
        (torch.optim.AdamW, sgd, "checkpoint has .*'betas'.*, this one .*'momentum'"),
        (sgd, sgd_of_two_groups, "has 1 parameter groups, this run 2"),
    ],
)
def test_the_state_of_another_optimizer_is_refused_before_it_is_loaded(saved, own, message):
    trainer = trainer_of(own)
    with pytest.raises(ConfigError, match=message):
        trainer.load_state_dict(state_of(saved))
    assert trainer.optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("make", [sgd, sgd_of_two_groups, torch.optim.AdamW])
def test_that_of_the_same_is_taken_also_from_another_version_of_torch(make):
    trainer, state = trainer_of(make), state_of(make)
    group = state["optimizer"]["param_groups"][0]
    group["of_a_later_version"] = group["initial_lr"] = 1
    trainer.load_state_dict(state)
    del group["of_a_later_version"], group["maximize"]
    trainer.load_state_dict(state)
    assert trainer.optimizer.param_groups[0]["maximize"] is False
    assert len(trainer.optimizer.state_dict()["state"]) == 2
