from types import SimpleNamespace

import pytest
import torch

from tests.engine.tiny import Regression, batches, sgd
from trainkit.engine.hooks import CallbackHook, EmptyCache, EvalHook
from trainkit.engine.step import SimpleTrainer
from trainkit.evaluation import inference_on_dataset


@pytest.fixture
def calls(monkeypatch):
    """What happens; torch's functions for the device of this machine are replaced."""
    calls = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda **_: None
    )  # the evaluation asks for it as well
    monkeypatch.setattr(torch, "get_device_module", lambda: SimpleNamespace(empty_cache=lambda: calls.append("empty")))
    return calls


def run(calls, hook, data):
    """Two epochs of two iterations, an evaluation of two batches at the end."""
    model = Regression()
    trainer = SimpleTrainer(model, data, sgd(model))
    monitor = CallbackHook(
        before_step=lambda trainer: calls.append(trainer.iter),
        before_eval_step=lambda trainer, phase, index, inputs: calls.append(f"eval {index}"),
    )
    trainer.register_hooks([hook, monitor, EvalHook(0, lambda: inference_on_dataset(model, batches(2), None))])
    trainer.train(0, 4)
    return calls


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [0, 1, "empty", 2, 3, "empty", "eval 0", "eval 1", "empty"]),
        ({"after_epoch": False}, [0, 1, 2, 3, "eval 0", "eval 1"]),
        (
            {"after_epoch": False, "before_epoch": True},
            ["empty", 0, 1, "empty", 2, 3, "empty", "eval 0", "eval 1"],
        ),
        (
            {"after_epoch": False, "after_step": True},
            [0, "empty", 1, "empty", 2, "empty", 3, "empty", "eval 0", "empty", "eval 1", "empty"],
        ),
    ],
)
def test_the_cache_is_emptied_where_it_was_asked_for_in_training_and_in_evaluation(calls, arguments, expected):
    assert run(calls, EmptyCache(**arguments), batches(2)) == expected
