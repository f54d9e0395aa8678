"""Hooks for losses and gradients: finite losses, the norm, parameters that are frozen or have no gradient."""

import copy
import math

import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep, Regression, Weight, batches, sgd
from tests.two_ranks import on_two_ranks
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer
from trainkit.engine.amp import AMPTrainer
from trainkit.engine.hooks import CallbackHook, CheckFiniteLoss, Freeze, GradNorm, UnusedParameters
from trainkit.engine.step import SimpleTrainer


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(("interval", "iter"), [(3, 5), (4, 3)])
def test_every_interval_th_iteration_stops_before_its_update(interval, iter):
    model, weights = (
        Weight(lambda weight, batch: {"loss": weight * batch, "logged": batch * math.nan}),
        [],
    )
    data = [torch.tensor(value) for value in [1.0, 1.0, 1.0, math.nan, 1.0, math.nan]]
    trainer = SimpleTrainer(model, data, sgd(model, lr=0.25), async_write_metrics=True)
    note = CallbackHook(before_step=lambda _: weights.append(model.weight.item()))
    trainer.register_hooks([CheckFiniteLoss(interval), note])
    with pytest.raises(FloatingPointError, match=f"in iteration {iter}, .*'loss': nan"):
        trainer.train(0, 6)
    assert trainer.iter == iter
    assert trainer.status == "failed"
    assert model.weight.item() == pytest.approx(weights[iter], nan_ok=True)
    # what an asynchronous run does to the weights in the iterations between
    assert [math.isnan(weight) for weight in weights] == [i > 3 for i in range(iter + 1)]


def test_the_norm_of_all_gradients_is_stored_every_period_and_in_the_last_iteration():
    model, norms = Regression(), []

    def note(trainer):
        norms.append(torch.cat([parameter.grad.flatten() for parameter in trained]).norm().item())

    trainer = SimpleTrainer(model, batches(5), sgd(model))
    trained = trainer.optimizer.param_groups[0]["params"]
    del trained[1:]  # the gradient of a parameter in no optimizer grows
    trainer.register_hooks([GradNorm(2), CallbackHook(after_backward=note)])
    trainer.train(0, 5)
    assert trainer.storage.history("grad_norm").values() == [
        (pytest.approx(norms[i]), i) for i in (1, 3, 4)
    ]


def test_with_clipping_by_a_norm_the_hook_is_an_error_before_training(tmp_path):
    options = ("HOOKS", [{"NAME": "GradNorm"}], "SOLVER.CLIP_GRADIENTS.ENABLED", True)
    by_norm = (*options, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "norm")
    with pytest.raises(ConfigError, match="SOLVER.CLIP_GRADIENTS stores grad_norm already"):
        DefaultTrainer(tiny_cfg(tmp_path / "norm", *by_norm)).train()

    trainer = DefaultTrainer(tiny_cfg(tmp_path / "value", *options))
    trainer.train()
    assert "grad_norm" in trainer.storage.histories()  # values are clipped without a norm


class Switch(nn.Module):
    """A batch names the head that is used."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ParameterDict({name: torch.ones(()) for name in "abc"})

    def forward(self, batch):
        return self.heads[batch] * 2


@pytest.mark.parametrize("trainer_class", [SimpleTrainer, AMPTrainer])
def test_parameters_without_a_gradient_are_named_at_first_and_every_period_if_they_have_changed(
    trainer_class, caplog
):
    def found(data, iters=1, period=1, **kwargs):
        """[(iteration, names), ...] of the log lines."""
        caplog.clear()
        trainer = trainer_class(model := Switch(), list(data), sgd(model), **kwargs)
        trainer.register_hooks([UnusedParameters(period)])
        trainer.train(0, iters)
        return [record.args for record in caplog.records if record.levelname == "ERROR"]

    assert found("aaabbc", iters=6, period=0) == [(0, "heads.b, heads.c")]
    assert found("aaabbc", iters=6) == [
        (0, "heads.b, heads.c"),
        (3, "heads.a, heads.c"),
        (5, "heads.a, heads.b"),
    ]
    # one micro-batch is enough
    assert found("abc", accumulation_steps=3) == []
    assert found("abb", accumulation_steps=3) == [(0, "heads.c")]


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
        with_gradient.append(
            {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        )

    trainer = SimpleTrainer(
        wrap(model), batches(1), sgd(model, lr=0.05, momentum=0.9, weight_decay=0.1)
    )
    trainer.register_hooks([Freeze(names, begin=2, end=5), AfterStep(note)])
    trainer.train(0, 7)
    assert all(parameter.requires_grad for parameter in model.parameters())

    def differing(before, after):
        return {
            name for name in ALL if not torch.equal(weights[before][name], weights[after][name])
        }

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
