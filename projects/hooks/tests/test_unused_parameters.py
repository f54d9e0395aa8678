import logging

import pytest
import torch
from torch import nn

from tests.engine.tiny import Weight, sgd
from trainkit.engine.amp import AMPTrainer
from trainkit.engine.hooks import UnusedParameters
from trainkit.engine.step import SimpleTrainer


class Two(nn.Module):
    """A trunk and two heads; ``uses`` are called, ``losses`` make up the loss; a batch is ``[N, 2]``."""

    def __init__(self, uses=("trunk", "a"), losses=("a",)):
        super().__init__()
        self.trunk, self.a, self.b = (nn.Linear(2, 2, bias=False) for _ in range(3))
        self.uses, self.losses = uses, losses

    def forward(self, batch):
        x = self.trunk(batch) if "trunk" in self.uses else batch
        outputs = {name: getattr(self, name)(x) for name in ("a", "b") if name in self.uses}
        return sum(outputs[name].square().mean() for name in self.losses)


def findings(model, caplog, iters=1, trainer_class=SimpleTrainer, data=None, period=1, **kwargs):
    """[(iteration, never used, used and ignored), ...] of the log lines."""
    caplog.clear()
    data = [torch.ones(3, 2)] if data is None else data
    trainer = trainer_class(model, data, sgd(model), **kwargs)
    trainer.register_hooks([UnusedParameters(period)])
    trainer.train(0, iters)
    assert trainer.status == "finished"
    return [read(record.message) for record in caplog.records if record.levelno == logging.ERROR]


def read(message):
    head, _, rest = message.partition(", never used in the forward pass: ")
    never, _, rest = rest.partition("; used there, but the loss does not depend on them: ")
    ignored, _, _ = rest.partition(". Remove or freeze them")
    return int(head.removeprefix("Parameters without a gradient in iteration ")), never, ignored


@pytest.mark.parametrize("trainer_class", [SimpleTrainer, AMPTrainer])
@pytest.mark.parametrize(
    ("uses", "losses", "expected"),
    [
        (("trunk", "a", "b"), ("a", "b"), []),
        (("trunk", "a"), ("a",), [(0, "b.weight", "none")]),
        (("trunk", "a", "b"), ("a",), [(0, "none", "b.weight")]),
        (("a", "b"), ("b",), [(0, "trunk.weight", "a.weight")]),
    ],
)
def test_unused_and_ignored_parameters_are_named_apart(uses, losses, expected, trainer_class, caplog):
    assert findings(Two(uses, losses), caplog, trainer_class=trainer_class) == expected


def test_a_shared_parameter_is_used_by_whoever_uses_it(caplog):
    model = Two()
    model.b.weight = model.a.weight
    assert findings(model, caplog) == []
    model = Two(uses=("trunk",), losses=())
    model.b.weight = model.a.weight
    model.extra = nn.Parameter(torch.ones(()))
    model.forward = lambda batch: model.extra + 0 * model.trunk(batch).sum()
    assert findings(model, caplog) == [(0, "a.weight", "none")]


class Attention(nn.Module):
    """nn.MultiheadAttention uses the parameters of its out_proj without calling it; nn.LSTM takes a list of them."""

    def __init__(self, ignored):
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1)
        self.lstm = nn.LSTM(2, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(2, 2))
        self.gain = nn.Parameter(torch.ones(()))
        self.ignored = ignored

    def forward(self, batch):
        x, _ = self.attention(batch, batch, batch)
        x, _ = self.lstm(x @ self.scale.T)
        return self.gain * (batch if self.ignored else x).sum()


def test_parameters_that_no_module_call_shows_are_seen(caplog):
    assert findings(Attention(ignored=False), caplog) == []
    everything = (
        "scale, attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, attention.out_proj.bias, "
        "lstm.weight_ih_l0, lstm.weight_hh_l0"
    )
    assert findings(Attention(ignored=True), caplog) == [(0, "none", everything)]


class Switch(nn.Module):
    """A batch names the head that is used."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ParameterDict({name: torch.ones(()) for name in "abc"})

    def forward(self, batch):
        return self.heads[batch] * 2


def test_under_accumulation_one_micro_batch_is_enough(caplog):
    assert findings(Switch(), caplog, data=["a", "b", "c"], accumulation_steps=3) == []
    assert findings(Switch(), caplog, data=["a", "b", "b"], accumulation_steps=3) == [(0, "heads.c", "none")]
    assert findings(Switch(), caplog, data=["a"]) == [(0, "heads.b, heads.c", "none")]


@pytest.mark.parametrize(
    ("period", "expected"),
    [
        (0, [(0, "heads.b, heads.c", "none")]),
        (1, [(0, "heads.b, heads.c", "none"), (3, "heads.a, heads.c", "none"), (5, "heads.a, heads.b", "none")]),
        (3, [(0, "heads.b, heads.c", "none"), (5, "heads.a, heads.b", "none")]),
    ],
)
def test_it_looks_first_and_every_period_and_says_what_has_changed(period, expected, caplog):
    assert findings(Switch(), caplog, iters=6, data=["a", "a", "a", "b", "b", "c"], period=period) == expected


def test_it_ends_the_run_before_the_update_if_asked_to():
    model = Switch()
    trainer = SimpleTrainer(model, ["a"], sgd(model))
    trainer.register_hooks([UnusedParameters(raise_error=True)])
    message = "parameters without a gradient in iteration 0, never used in the forward pass: heads.b, heads.c; "
    with pytest.raises(RuntimeError, match=message):
        trainer.train(0, 3)
    assert (trainer.status, model.heads["a"].item()) == ("failed", 1.0)

    everything = Two(("trunk", "a", "b"), ("a", "b"))
    trainer = SimpleTrainer(everything, [torch.ones(3, 2)], sgd(everything))
    trainer.register_hooks([UnusedParameters(raise_error=True)])
    trainer.train(0, 3)
    assert trainer.status == "finished"


def test_nothing_is_watched_behind_a_step_that_fails(caplog):
    class Fails(Exception):
        pass

    def compute(weight, batch):
        watched.append(torch.overrides.has_torch_function((weight,)))
        if batch == 1:
            raise Fails
        return weight * 2

    watched = []
    model = Weight(compute)
    trainer = SimpleTrainer(model, [0, 1], sgd(model))
    trainer.register_hooks([UnusedParameters()])
    with pytest.raises(Fails):
        trainer.train(0, 2)
    assert watched == [True, True]
    assert not torch.overrides.has_torch_function((model.weight,))
    model(0)
    assert watched == [True, True, False]
