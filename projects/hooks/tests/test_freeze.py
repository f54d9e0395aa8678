"""Parameters that are frozen in some iterations."""

import copy

import pytest
import torch
from torch import nn

from tests.engine.tiny import AfterStep, batches, sgd
from tests.two_ranks import on_two_ranks
from trainkit.config import ConfigError
from trainkit.engine import SimpleTrainer
from trainkit.engine.hooks import Freeze


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, batch):
        x, y = batch
        return (self.head(self.body(x)) - y).square().mean()


BODY = {"body.weight", "body.bias"}
ALL = BODY | {"head.weight", "head.bias"}


def run(wrap=lambda model: model, names="body.*"):
    """Which parameters have gradients in each iteration, and which change from one to another."""
    model, weights, with_gradient = Net(), [], []

    def note(trainer):
        weights.append(copy.deepcopy(model.state_dict()))
        with_gradient.append({name for name, parameter in model.named_parameters() if parameter.grad is not None})

    trainer = SimpleTrainer(wrap(model), batches(1), sgd(model, lr=0.05, momentum=0.9, weight_decay=0.1))
    trainer.register_hooks([Freeze(names, begin=2, end=5), AfterStep(note)])
    trainer.train(0, 7)
    assert all(parameter.requires_grad for parameter in model.parameters())

    def differing(before, after):
        return {name for name in ALL if not torch.equal(weights[before][name], weights[after][name])}

    return with_gradient, [differing(*pair) for pair in ((0, 1), (1, 4), (4, 5), (5, 6))]


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["plain", "wrapped"])
def test_a_frozen_parameter_gets_no_gradient_and_keeps_its_bits_until_the_end(wrap):
    with_gradient, changes = run(wrap)
    assert with_gradient == [ALL, ALL, *[ALL - BODY] * 3, ALL, ALL]
    assert changes == [ALL, ALL - BODY, ALL, ALL]


def test_a_pattern_without_a_parameter_is_an_error_before_training():
    with pytest.raises(ConfigError, match=r"names of Freeze has \['bdy.weight'\]"):
        run(names=["head.*", "bdy.weight"])


def _ddp(rank, folder):
    return run(nn.parallel.DistributedDataParallel)[1]


@pytest.mark.slow
def test_it_works_in_ddp(tmp_path):
    assert on_two_ranks([_ddp], tmp_path)["_ddp"] == [[ALL, ALL - BODY, ALL, ALL]] * 2
