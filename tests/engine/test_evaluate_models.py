"""Which weights an evaluation runs, and where the results of each are."""

import pytest
import torch

from tests.engine.tiny import Weight, sgd
from trainkit.engine.evaluation_run import evaluate_models
from trainkit.engine.hooks import CallbackHook, EMAHook
from trainkit.engine.step import SimpleTrainer


def results_of(hooks, test=lambda cfg, model: {"task": {"weight": model.weight.item()}}):
    """The results after three updates; the weight is -2, and the mean of the updates -1."""
    model = Weight()
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], sgd(model, lr=1.0))
    trainer.register_hooks(hooks)
    trainer.train(0, 3)
    return evaluate_models(test, None, model, hooks)


@pytest.mark.parametrize(
    ("hooks", "expected"),
    [
        ([], {"task": {"weight": -2.0}}),
        ([EMAHook(kind="mean")], {"task": {"weight": -1.0}}),
        ([EMAHook(kind="mean", evaluate="raw")], {"task": {"weight": -2.0}}),
        ([EMAHook(kind="mean", evaluate="both")], {"task": {"weight": -1.0}, "raw": {"task": {"weight": -2.0}}}),
        ([CallbackHook(), EMAHook(kind="mean"), EMAHook(0.5, evaluate="raw")], {"task": {"weight": -1.0}}),
    ],
    ids=["no hook", "ema", "raw", "both", "the first of two"],
)
def test_the_results_are_those_of_the_weights_that_are_asked_for(hooks, expected):
    assert results_of(hooks) == expected
