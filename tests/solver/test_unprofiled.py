"""Without a profiler the calls of an optimizer do the same in less time; whatever is its own is called."""

import functools
from types import MethodType

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from tests.engine.tiny import PlainOptimizer, Weight, sgd
from trainkit.solver import unprofiled


def model_with_gradient():
    model = Weight()
    model(torch.tensor(2.0)).backward()
    return model


def test_gradients_become_none_in_every_group():
    first, second, frozen = model_with_gradient(), model_with_gradient(), Weight()
    optimizer = sgd(first)
    optimizer.add_param_group({"params": [second.weight, frozen.weight]})
    unprofiled.zero_grad(optimizer)
    assert [model.weight.grad for model in (first, second, frozen)] == [None, None, None]


class Own(torch.optim.SGD):
    """Keeps zeros instead of None, and notes its steps."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.steps = 0

    def zero_grad(self, set_to_none=False):
        super().zero_grad(set_to_none)

    def step(self, closure=None):
        self.steps += 1
        super().step(closure)


def patched(optimizer):
    optimizer.steps = 0
    zero_grad, step = optimizer.zero_grad, optimizer.step

    def count_and_step(self):
        self.steps += 1
        step()

    optimizer.zero_grad, optimizer.step = lambda: zero_grad(set_to_none=False), MethodType(count_and_step, optimizer)
    return optimizer


class Delegating:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


def wrapping(params):
    """A class whose step says that it is torch's, as ``functools.wraps`` has it."""
    torch.optim.SGD(params, lr=0.1)  # torch wraps the step of a class when it is first used

    class Wrapping(Own):
        @functools.wraps(torch.optim.SGD.step)
        def step(self, closure=None):
            self.steps += 1
            torch.optim.SGD.step(self, closure)

    return Wrapping(params)


WRAPPED = {
    "overridden with wraps": lambda model: wrapping([*model.parameters()]),
    "overridden": lambda model: Own(model.parameters()),
    "patched": lambda model: patched(sgd(model)),
    "patched and scheduled": lambda model: scheduled(patched(sgd(model))),
    "delegating": lambda model: Delegating(Own(model.parameters())),
    "wrapped": lambda model: PlainOptimizer(Own(model.parameters())),
}


def scheduled(optimizer):
    optimizer.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda iter: 1.0)
    return optimizer


@pytest.mark.parametrize("wrap", [pytest.param(wrap, id=name) for name, wrap in WRAPPED.items()])
def test_methods_of_its_own_are_called(wrap):
    model = model_with_gradient()
    optimizer = wrap(model)
    unprofiled.step(optimizer)
    assert getattr(optimizer, "optimizer", optimizer).steps == 1
    assert model.weight.item() == pytest.approx(1 - 0.1 * 2)
    unprofiled.zero_grad(optimizer)
    assert model.weight.grad == torch.tensor(0.0)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, scheduled], ids=["plain", "scheduled"])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.AdamW(params, lr=0.1),
        lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    ],
    ids=["SGD", "AdamW", "fused Adam"],
)
def test_steps_are_those_of_the_optimizer(make, wrap):
    models = Weight(), Weight()
    for model, step in zip(models, (unprofiled.step, lambda optimizer: optimizer.step()), strict=True):
        optimizer = wrap(make(model.parameters()))
        for batch in range(5):
            unprofiled.zero_grad(optimizer)
            model(torch.tensor(float(batch))).backward()
            step(optimizer)
    assert models[0].weight.item() == models[1].weight.item() != 1.0


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
@pytest.mark.parametrize("where", ["optimizer", "everywhere"])
def test_hooks_of_the_optimizer_are_called(register, where):
    calls = []
    model = model_with_gradient()
    optimizer = sgd(model)
    owner = optimizer if where == "optimizer" else torch_optimizer
    name = register if where == "optimizer" else register.replace("step", "optimizer_step")
    handle = getattr(owner, name)(lambda *_: calls.append("hook"))
    try:
        unprofiled.step(optimizer)
    finally:
        handle.remove()
    unprofiled.step(optimizer)
    assert calls == ["hook"]


def test_a_scheduler_knows_of_the_step(recwarn):
    optimizer = scheduled(sgd(model_with_gradient()))
    unprofiled.step(optimizer)
    optimizer.scheduler.step()  # warns where no step came before it
    assert [str(warning.message) for warning in recwarn] == []


def test_a_profiler_sees_the_ranges():
    model = model_with_gradient()
    optimizer = sgd(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        unprofiled.step(optimizer)
        unprofiled.zero_grad(optimizer)
    names = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= names
    assert model.weight.grad is None
