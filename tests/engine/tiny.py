"""Small things that the tests of the engine train."""

import io
import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainkit.checkpoint.file import plain_state
from trainkit.engine import metrics
from trainkit.engine.hook_base import HookBase
from trainkit.engine.hooks import CallbackHook
from trainkit.engine.loop import TrainerBase
from trainkit.engine.step import SimpleTrainer

CLOCK_READINGS = {"time", "data_time", "rank_data_time", "eta_seconds"}


class Regression(nn.Module):
    """A batch is ``(x [N, 3], y [N, 1])``; the loss is the mean squared error."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[0.5, -0.25, 0.125]]))
            self.linear.bias.zero_()

    def forward(self, batch):
        x, y = batch
        return (self.linear(x) - y).square().mean()


class Weight(nn.Module):
    """One weight that starts at 1; ``compute(weight, batch)`` is what the model returns."""

    def __init__(self, compute=lambda weight, batch: weight * batch):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.compute = compute

    def forward(self, batch):
        return self.compute(self.weight, batch)


def batches(count, size=4):
    generator = torch.Generator().manual_seed(7)
    xs = torch.randn(count, size, 3, generator=generator)
    return [(x, x.sum(1, keepdim=True)) for x in xs]


def sgd(model, lr=0.1, **kwargs):
    return torch.optim.SGD(model.parameters(), lr=lr, **kwargs)


class PlainOptimizer:
    """A wrapper that is no ``torch.optim.Optimizer``; ``calls`` gets the name of what is called."""

    def __init__(self, optimizer, calls=None):
        self.optimizer = optimizer
        self.calls = [] if calls is None else calls

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self):
        self.calls.append("zero_grad")
        self.optimizer.zero_grad()

    def step(self):
        self.calls.append("update")
        self.optimizer.step()

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)


class Steps(TrainerBase):
    """A loop that trains nothing; ``step(iter)`` is called in each iteration."""

    def __init__(self, hooks=(), step=lambda iter: None):
        super().__init__()
        self.step = step
        self.register_hooks(hooks)

    def run_step(self):
        self.step(self.iter)


class AfterStep(HookBase):
    def __init__(self, action):
        self.action = action

    def after_step(self):
        self.action(self.trainer)


def fail_at(iter):
    def step(now):
        if now == iter:
            raise RuntimeError(f"step {iter} failed")

    return step


def stop_at(iter, *, finished=False):
    return AfterStep(
        lambda trainer: trainer.iter == iter and trainer.request_stop("enough", finished=finished)
    )


def through_a_file(state):
    """A state as it is when a checkpoint is loaded."""
    file = io.BytesIO()
    torch.save(plain_state(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def scalars(trainer):
    """name -> [(value, iteration), ...] of everything stored, clock readings aside."""
    histories = trainer.storage.histories()
    return {
        name: history.values() for name, history in histories.items() if name not in CLOCK_READINGS
    }


@contextmanager
def metrics_by_worker():
    """Inside, asynchronous metrics are looked at by the worker alone, as on CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        event = SimpleNamespace(device=torch.device("cpu"), synchronize=lambda: None)
        patch.setattr(metrics, "runs_ahead", lambda device: True)
        patch.setattr(metrics, "new_event", lambda device: event)
        yield


def state_of(trainer):
    """The tensors that updates change."""
    return [
        *trainer.model.parameters(),
        *(v for s in trainer.optimizer.state.values() for v in s.values() if v is not None),
    ]


def poison_at(*iters, value=math.nan):
    """The gradient of the first parameter, after the backward pass."""

    def poison(trainer):
        if trainer.iter in iters:
            next(trainer.model.parameters()).grad.view(-1)[0] = value

    return CallbackHook(after_backward=poison)


def poisoned(iters, make=sgd, trainer_class=SimpleTrainer, **kwargs):
    model = Regression()
    trainer = trainer_class(model, batches(10), make(model), **kwargs)
    trainer.register_hooks([poison_at(*iters)])
    return trainer
