"""Which weights an evaluation runs, and where the results of each are."""

import logging

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
        ([CallbackHook(), EMAHook(kind="mean"), EMAHook(0.5)], {"task": {"weight": -1.0}}),
    ],
    ids=["no hook", "ema", "raw", "both", "the first of two"],
)
def test_the_results_are_those_of_the_weights_that_are_asked_for(hooks, expected):
    assert results_of(hooks) == expected


def tables(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "trainkit.evaluation.testing"]


def test_both_stand_in_one_table(caplog):
    caplog.set_level(logging.INFO)
    results_of([EMAHook(kind="mean", evaluate="both")])
    assert tables(caplog) == [
        "Evaluation results:\n"
        "| weights   | task   | metric   |   value |\n"
        "|:----------|:-------|:---------|--------:|\n"
        "| ema       | task   | weight   | -1.0000 |\n"
        "| raw       | task   | weight   | -2.0000 |"
    ]
    caplog.clear()
    results_of([EMAHook(kind="mean")])
    assert tables(caplog) == []


def test_the_table_of_several_datasets_has_a_column_for_them(caplog):
    caplog.set_level(logging.INFO)
    results = results_of(
        [EMAHook(kind="mean", evaluate="both")],
        lambda cfg, model: {"a": {"task": {"weight": model.weight.item()}}, "b": {"task": {"n": 1}}},
    )
    assert results["raw"]["a"] == {"task": {"weight": -2.0}}
    (table,) = tables(caplog)
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[1:]][:1] == [
        ["weights", "dataset", "task", "metric", "value"]
    ]
    assert "| raw       | b         | task   | n        |       1 |" in table
