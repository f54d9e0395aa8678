"""Gradients are let go as the optimizer does it, or by the optimizer where it has a way of its own."""

import pytest
import torch

from tests.engine.tiny import PlainOptimizer, Weight, sgd
from trainkit.solver.gradients import drop_gradients


def model_with_gradient():
    model = Weight()
    model(torch.tensor(2.0)).backward()
    return model


def test_gradients_become_none_in_every_group():
    first, second, frozen = model_with_gradient(), model_with_gradient(), Weight()
    optimizer = sgd(first)
    optimizer.add_param_group({"params": [second.weight, frozen.weight]})
    drop_gradients(optimizer)
    assert [model.weight.grad for model in (first, second, frozen)] == [None, None, None]


class KeepsZeros(torch.optim.SGD):
    def zero_grad(self, set_to_none=False):
        super().zero_grad(set_to_none)


def patched(optimizer):
    optimizer.zero_grad = lambda: torch.optim.SGD.zero_grad(optimizer, set_to_none=False)
    return optimizer


class Delegating:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: KeepsZeros(model.parameters(), lr=0.1),
        lambda model: patched(sgd(model)),
        lambda model: Delegating(KeepsZeros(model.parameters(), lr=0.1)),
        lambda model: PlainOptimizer(KeepsZeros(model.parameters(), lr=0.1)),
    ],
    ids=["overridden", "patched", "delegating", "wrapped"],
)
def test_a_zero_grad_of_its_own_is_called(wrap):
    model = model_with_gradient()
    drop_gradients(wrap(model))
    assert model.weight.grad == torch.tensor(0.0)
