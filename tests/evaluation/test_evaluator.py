import logging
import random
import re
import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from trainkit.evaluation import (
    DatasetEvaluator,
    inference_context,
    inference_on_dataset,
    observe_inference,
)
from trainkit.evaluation.observer import EvaluationAbandoned, InferenceObserver


class Recorder(DatasetEvaluator):
    """Reports under ``key`` what it saw."""

    def __init__(self, key="seen", on_process=None):
        self.key, self.on_process = key, on_process

    def bind(self, model):
        self.model = model

    def reset(self):
        self.seen = []

    def process(self, inputs, outputs):
        self.seen.append((inputs, outputs))
        if self.on_process is not None:
            self.on_process()

    def evaluate(self):
        return {self.key: len(self.seen)}


def modes(model):
    return [module.training for module in model.modules()]


def rng_states():
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, keys.tolist(), *rest), torch.get_rng_state().tolist()


class Looker:
    """Has no methods beside detectron2's, and reports nothing."""

    reset = process = evaluate = lambda *_: None


def test_evaluators_get_inputs_with_outputs_and_are_merged_and_none_only_runs_the_model():
    evaluator, calls = Recorder(), []
    assert inference_on_dataset(lambda batch: batch * 10, iter([1, 2, 3]), evaluator) == {"seen": 3}
    assert evaluator.seen == [(1, 10), (2, 20), (3, 30)]
    assert evaluator.model(5) == 50
    # it is reset
    assert inference_on_dataset(str, [1], [Recorder("a"), Looker(), evaluator]) == {
        "a": 1,
        "seen": 1,
    }
    names = ("on_end", "on_start", "after_inference", "before_inference")
    callbacks = {name: lambda name=name: calls.append(name) for name in names}
    assert inference_on_dataset(calls.append, [1, 2], None, callbacks) == {}
    assert calls == ["on_start", "before_inference", 1, 2, "after_inference", "on_end"]
    with pytest.raises(ValueError, match=r"Recorder .*'top1'"):
        inference_on_dataset(str, [1], [Recorder("top1"), Recorder("top1")])


def test_an_evaluator_whose_length_is_0_evaluates_too():
    class Sized(Recorder):
        def __len__(self):
            return 0

    assert inference_on_dataset(nn.Identity(), [torch.ones(1)], Sized())["seen"]


def test_an_empty_loader_is_an_error_that_names_the_loader_and_has_no_end():
    observer = StopsBefore(9)
    with (
        pytest.raises(ValueError, match=r"DataLoader gave no batch"),
        observe_inference(observer, "val"),
    ):
        inference_on_dataset(str, DataLoader([]), Recorder())
    assert observer.calls == []


@pytest.mark.parametrize("fails", [False, True])
def test_modes_of_every_submodule_and_the_random_state_are_as_they_were_also_after_a_failure(fails):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    model[1][0].eval()  # modes that neither train() nor eval() on the whole gives back
    modes_before, states_before = modes(model), rng_states()
    grad_enabled, any_training = [], []
    loader = DataLoader(torch.zeros(2, 1, 2).expand(2, 3, 2), batch_size=None)  # draws a seed

    def look():
        random.random(), np.random.rand(), torch.rand(1)
        grad_enabled.append(torch.is_grad_enabled())
        any_training.append(any(modes(model)))
        return 1 / 0 if fails else 0

    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        inference_on_dataset(model, loader, Recorder(on_process=look))
    assert {*grad_enabled} == {False}
    assert {*any_training} == {False}
    assert modes(model) == modes_before
    assert rng_states() == states_before
    with inference_context(model):
        assert not any(modes(model))
    assert modes(model) == modes_before != modes(model.train())


class Pick(nn.Module):
    def forward(self, batch):
        return batch["x"]


def test_inputs_are_moved_to_the_device_of_the_model_inside_a_wrapper_and_the_callers_autocast_is_in_force():
    evaluator = Recorder()
    inference_on_dataset(
        nn.Sequential(Pick(), nn.Linear(2, 1, device="meta")), [{"x": torch.ones(3, 2)}], evaluator
    )
    inputs, outputs = evaluator.seen[0]
    assert inputs["x"].device.type == outputs.device.type == "meta"

    class Wrapper(nn.DataParallel):
        def forward(self, *inputs):
            pytest.fail("the wrapper's forward would communicate")

    with torch.autocast("cpu", dtype=torch.bfloat16):
        inference_on_dataset(Wrapper(nn.Linear(2, 1)), [torch.ones(3, 2)], evaluator)
    assert evaluator.seen[0][1].dtype == torch.bfloat16


def test_progress_is_logged_every_five_seconds_with_an_eta_and_a_total_at_the_end(
    monkeypatch, caplog
):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def compute(_):
        now[0] += 2.5

    with caplog.at_level(logging.INFO, logger="trainkit.evaluation"):
        inference_on_dataset(compute, range(10), None, name="digits_val")
        inference_on_dataset(compute, iter(range(2)), None)
        inference_on_dataset(compute, range(1), None)
    progress = [re.findall(r"\d[\d.:]*", text) for text in caplog.messages if " done" in text]
    assert progress == [
        ["2", "10", "2.5000", "0:00:20"],  # batches, of how many, seconds for each, ETA
        ["4", "10", "2.5000", "0:00:15"],
        ["6", "10", "2.5000", "0:00:10"],
        ["8", "10", "2.5000", "0:00:05"],
        ["10", "10", "2.5000", "0:00:00"],
        ["2", "2.5000"],
    ]
    assert re.findall(r"\d[\d.:]*", caplog.messages[-1]) == ["0:00:02", "2.500000"]


class StopsBefore(InferenceObserver):
    """Is asked to stop before the batch of this index."""

    def __init__(self, index):
        self.index, self.calls = index, []

    def is_stopping(self):
        return len(self.calls) == self.index

    def after_eval_step(self, phase, index, inputs, outputs):
        self.calls.append(inputs)

    def after_eval(self, phase, name, results):
        self.calls.append(results)


def test_an_observer_that_is_stopping_abandons_the_evaluation_at_the_next_batch():
    observer, called = StopsBefore(2), []
    names = ("on_start", "before_inference", "after_inference", "on_end")
    callbacks = {name: lambda name=name: called.append(name) for name in names}
    message = "the evaluation of cats was abandoned: the run is to stop"
    with pytest.raises(EvaluationAbandoned, match=message), observe_inference(observer, "val"):
        inference_on_dataset(str, [5, 6, 7, 8], Recorder(), callbacks, name="cats")
    assert observer.calls == [5, 6]
    assert called == ["on_start", "before_inference"]
