"""Which weights an evaluation runs, and where the results of each are."""

import pytest
import torch

from tests.engine.tiny import Weight, sgd
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import CallbackHook, EMAHook
from trainkit.engine.step import SimpleTrainer


class Job(DefaultTrainer):
    @classmethod
    def test(cls, cfg, model, evaluators=None):
        return {"task": {"weight": model.weight.item()}}


@pytest.mark.parametrize(
    ("hooks", "expected"),
    [
        ([], {"task": {"weight": -2.0}}),
        ([EMAHook(kind="mean", evaluate="raw")], {"task": {"weight": -2.0}}),
        ([EMAHook(kind="mean", evaluate="both")], {"task": {"weight": -1.0}, "raw": {"task": {"weight": -2.0}}}),
        ([CallbackHook(), EMAHook(kind="mean"), EMAHook(0.5, evaluate="raw")], {"task": {"weight": -1.0}}),
    ],
    ids=["no hook", "raw", "both", "the first of two"],
)
def test_the_results_are_those_of_the_weights_that_are_asked_for(hooks, expected):
    model = Weight()  # -2 after three updates; the mean of the updates is -1
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], sgd(model, lr=1.0))
    trainer.register_hooks(hooks)
    trainer.train(0, 3)
    assert Job.test_with_hooks(None, model, hooks) == expected
