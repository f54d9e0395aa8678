import logging

import pytest
import torch
from torch import nn

from tests.engine.tiny import sgd
from trainkit.engine.amp import AMPTrainer
from trainkit.engine.hooks import UnusedParameters
from trainkit.engine.step import SimpleTrainer


class Switch(nn.Module):
    """A batch names the head that is used."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ParameterDict({name: torch.ones(()) for name in "abc"})

    def forward(self, batch):
        return self.heads[batch] * 2


def findings(data, caplog, iters=1, trainer_class=SimpleTrainer, period=1, **kwargs):
    """[(iteration, names), ...] of the log lines."""
    caplog.clear()
    model = Switch()
    trainer = trainer_class(model, data, sgd(model), **kwargs)
    trainer.register_hooks([UnusedParameters(period)])
    trainer.train(0, iters)
    return [record.args for record in caplog.records if record.levelno == logging.ERROR]


@pytest.mark.parametrize("trainer_class", [SimpleTrainer, AMPTrainer])
def test_parameters_without_a_gradient_are_named_and_under_accumulation_one_micro_batch_is_enough(
    trainer_class, caplog
):
    assert findings(["a"], caplog, trainer_class=trainer_class) == [(0, "heads.b, heads.c")]
    options = {"accumulation_steps": 3, "trainer_class": trainer_class}
    assert findings(["a", "b", "c"], caplog, **options) == []
    assert findings(["a", "b", "b"], caplog, **options) == [(0, "heads.c")]


@pytest.mark.parametrize(
    ("period", "expected"),
    [
        (0, [(0, "heads.b, heads.c")]),
        (1, [(0, "heads.b, heads.c"), (3, "heads.a, heads.c"), (5, "heads.a, heads.b")]),
        (3, [(0, "heads.b, heads.c"), (5, "heads.a, heads.b")]),
    ],
)
def test_it_looks_first_and_every_period_and_says_what_has_changed(period, expected, caplog):
    assert findings(["a", "a", "a", "b", "b", "c"], caplog, iters=6, period=period) == expected


def test_it_ends_the_run_before_the_update_if_asked_to():
    model = Switch()
    trainer = SimpleTrainer(model, ["a"], sgd(model))
    trainer.register_hooks([UnusedParameters(raise_error=True)])
    with pytest.raises(RuntimeError, match="parameters without a gradient in iteration 0: heads.b, heads.c"):
        trainer.train(0, 3)
    assert (trainer.status, model.heads["a"].item()) == ("failed", 1.0)
