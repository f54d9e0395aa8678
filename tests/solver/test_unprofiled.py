"""In the ordinary case calls of torch do the same in less time; whatever is not as torch makes it is called."""

import functools
import logging
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


# ---------------------------------------------------------------------- backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_those_of_backward_and_the_graph_is_let_go(dtype):
    gradients = []
    for backward in (unprofiled.backward, torch.Tensor.backward):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.GELU(), torch.nn.Linear(5, 3)).to(dtype)
        for _ in range(2):  # the second ones are added
            loss = model(torch.randn(4, 7, dtype=dtype)).square().mean()
            backward(loss)
        gradients.append([parameter.grad for parameter in model.parameters()])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            backward(loss)
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    assert all(gradient.any() for gradient in gradients[0])


def test_a_function_that_changes_its_gradient_in_place_changes_that_of_no_other_step():
    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.mul_(3.0)

    model = Weight()
    for _ in range(2):
        unprofiled.backward(Tripled.apply(model.weight))
    assert model.weight.grad.item() == 6.0


def test_a_tensor_of_another_class_finds_its_own_backward():
    class Noting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            met.append(getattr(function, "__name__", ""))
            return super().__torch_function__(function, types, args, kwargs or {})

    met = []
    weight = torch.ones(()).as_subclass(Noting).requires_grad_()
    unprofiled.backward(weight * 2.0)
    assert "backward" in met
    assert weight.grad.item() == 2.0


def test_a_mode_sees_backward():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    seen, loss = [], Weight()(torch.tensor(2.0))
    with Mode():
        unprofiled.backward(loss)
    assert "backward" in seen


@pytest.mark.parametrize("owner", [torch.Tensor, torch.autograd], ids=["Tensor", "torch.autograd"])
def test_a_backward_that_somebody_has_put_in_its_place_is_called(monkeypatch, owner):
    calls, former = [], owner.backward
    monkeypatch.setattr(owner, "backward", lambda *args, **kwargs: (calls.append(owner), former(*args, **kwargs)))
    model = Weight()
    unprofiled.backward(model(torch.tensor(2.0)))
    assert calls == [owner]
    assert model.weight.grad.item() == 2.0


def test_torch_logs_the_graph_where_it_is_asked_to(caplog):
    loss = Weight()(torch.tensor(2.0))
    with caplog.at_level(logging.DEBUG, torch.autograd.graph.log.name):
        unprofiled.backward(loss)
    assert "Executing" in caplog.text


def test_a_complex_loss_is_refused_as_ever():
    weight = torch.ones((), dtype=torch.complex64, requires_grad=True)
    with pytest.raises(RuntimeError, match="only for real scalar outputs"):
        unprofiled.backward(weight * 2.0)
