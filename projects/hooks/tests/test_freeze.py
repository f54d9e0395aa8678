"""Parameters that are frozen in some iterations."""

import copy

import pytest
import torch
from torch import nn

from tests.engine.tiny import batches, sgd
from tests.two_ranks import on_two_ranks
from trainkit.config import ConfigError
from trainkit.engine import SimpleTrainer
from trainkit.engine.hooks import Freeze, HookBase


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, batch):
        x, y = batch
        return (self.head(self.body(x)) - y).square().mean()


class Record(HookBase):
    """The model's weights, and which parameters have gradients, after each iteration."""

    def __init__(self, model):
        self.model, self.weights, self.with_gradient = model, {}, {}

    def after_step(self):
        iter = self.trainer.iter
        self.weights[iter] = copy.deepcopy(self.model.state_dict())
        self.with_gradient[iter] = {n for n, p in self.model.named_parameters() if p.grad is not None}


def build(*hooks, wrap=lambda model: model):
    model = Net()
    record = Record(model)
    optimizer = sgd(model, lr=0.05, momentum=0.9, weight_decay=0.1)
    trainer = SimpleTrainer(wrap(model), batches(1), optimizer)  # one: a list has no position
    trainer.register_hooks([*hooks, record])
    return trainer, record


def differing(record, before, after):
    return {
        name for name, value in record.weights[before].items() if not torch.equal(value, record.weights[after][name])
    }


BODY = {"body.weight", "body.bias"}
ALL = BODY | {"head.weight", "head.bias"}


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["plain", "wrapped"])
def test_a_frozen_parameter_gets_no_gradient_and_keeps_its_bits_until_the_end(wrap):
    trainer, record = build(Freeze("body.*", begin=2, end=5), wrap=wrap)
    trainer.train(0, 7)

    assert differing(record, 1, 4) == ALL - BODY
    assert [record.with_gradient[iter] for iter in range(7)] == [ALL, ALL, *[ALL - BODY] * 3, ALL, ALL]
    for iter in (0, 4, 5):
        assert differing(record, iter, iter + 1) == (ALL if iter != 2 else ALL - BODY)
    assert all(parameter.requires_grad for parameter in record.model.parameters())


def test_a_mistake_is_an_error_before_training():
    trainer, record = build(Freeze(["head.*", "bdy.weight"]))
    with pytest.raises(ConfigError, match=r"names of Freeze has \['bdy.weight'\]"):
        trainer.train(0, 2)
    assert record.weights == {}


def _ddp(rank, folder):
    trainer, record = build(Freeze("body.*", begin=2, end=5), wrap=nn.parallel.DistributedDataParallel)
    trainer.train(0, 7)
    return [sorted(differing(record, before, after)) for before, after in ((0, 1), (1, 4), (4, 5))]


@pytest.mark.slow
def test_it_works_in_ddp(tmp_path):
    assert on_two_ranks([_ddp], tmp_path)["_ddp"] == [[sorted(ALL), sorted(ALL - BODY), sorted(ALL)]] * 2
