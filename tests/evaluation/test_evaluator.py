import logging
import random
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainkit.data import InferenceSampler, build_batch_data_loader
from trainkit.evaluation import (
    DatasetEvaluator,
    DatasetEvaluators,
    inference_context,
    inference_on_dataset,
    observe_inference,
)
from trainkit.evaluation.observer import EvaluationAbandoned, InferenceObserver


class Recorder(DatasetEvaluator):
    """Reports under ``key`` what it saw."""

    def __init__(self, key="seen", on_process=None):
        self.key, self.on_process = key, on_process

    def reset(self):
        self.seen = []

    def process(self, inputs, outputs):
        self.seen.append((inputs, outputs))
        if self.on_process is not None:
            self.on_process()

    def evaluate(self):
        return {self.key: len(self.seen)}


def mixed_mode_model():
    """Modes that neither ``train()`` nor ``eval()`` on the whole gives back."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    model.train()
    model[1][0].eval()
    return model


def modes(model):
    return [module.training for module in model.modules()]


def rng_states():
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, keys.tolist(), *rest), torch.get_rng_state().tolist()


def draw():
    random.random()
    np.random.rand()
    torch.rand(1)


def test_the_model_sees_every_batch_and_the_evaluator_inputs_with_outputs():
    evaluator = Recorder()
    assert inference_on_dataset(lambda batch: batch * 10, [1, 2, 3], evaluator) == {"seen": 3}
    assert evaluator.seen == [(1, 10), (2, 20), (3, 30)]


def test_an_evaluator_is_reset_by_each_evaluation():
    evaluator = Recorder()
    inference_on_dataset(str, [1, 2, 3], evaluator)
    assert inference_on_dataset(str, [1], evaluator) == {"seen": 1}


def test_a_list_of_evaluators_gives_the_merged_results():
    assert inference_on_dataset(str, [1, 2], [Recorder("a"), Recorder("b")]) == {"a": 2, "b": 2}


def test_no_evaluator_runs_the_model_and_gives_an_empty_dict():
    calls = []
    assert inference_on_dataset(calls.append, [1, 2], None) == {}
    assert calls == [1, 2]


def test_the_same_key_from_two_evaluators_is_an_error_that_names_it():
    evaluators = DatasetEvaluators([Recorder("top1"), Recorder("top1")])
    evaluators.reset()
    with pytest.raises(ValueError, match=r"'top1'.*another task name"):
        evaluators.evaluate()


def test_an_evaluator_that_returns_nothing_is_an_error_that_names_it():
    class Forgetful(DatasetEvaluator):
        def evaluate(self):
            self.results = {"task": {"metric": 1.0}}  # no return

    with pytest.raises(ValueError, match=r"Forgetful.evaluate\(\) returned None on rank 0; it must return a dict"):
        inference_on_dataset(str, [1], Forgetful())


def test_an_evaluator_that_only_looks_at_outputs_needs_no_evaluate():
    class Looker(DatasetEvaluator):
        def process(self, inputs, outputs):
            pass

    assert inference_on_dataset(str, [1], Looker()) == {}


def test_an_evaluator_learns_which_model_is_evaluated():
    class Curious(DatasetEvaluator):
        def bind(self, model):
            self.model = model

    curious = Curious()
    inference_on_dataset(str, [1], [curious])
    assert curious.model is str


def test_results_that_are_no_dict_are_an_error_that_names_the_evaluator():
    class Number(DatasetEvaluator):
        def evaluate(self):
            return 0.5

    with pytest.raises(TypeError, match=r"Number.evaluate\(\) must return a dict.*got float"):
        inference_on_dataset(str, [1], Number())


def test_something_that_is_no_evaluator_is_refused_before_the_model_runs():
    with pytest.raises(TypeError, match=r"evaluator must be .*got int"):
        inference_on_dataset(pytest.fail, [1], 3)


def test_callbacks_are_called_in_order_around_the_batches():
    calls = []
    names = ("on_end", "on_start", "after_inference", "before_inference")
    callbacks = {name: lambda name=name: calls.append(name) for name in names}
    inference_on_dataset(calls.append, ["batch 0", "batch 1"], None, callbacks)
    assert calls == ["on_start", "before_inference", "batch 0", "batch 1", "after_inference", "on_end"]


def test_an_unknown_callback_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'on_begin'.*on_start, before_inference"):
        inference_on_dataset(str, [1], None, {"on_begin": print})


def test_a_loader_without_length_works():
    assert inference_on_dataset(str, iter([1, 2, 3]), Recorder()) == {"seen": 3}


def test_an_empty_loader_is_an_error_that_names_the_loader():
    loader = torch.utils.data.DataLoader([])
    with pytest.raises(ValueError, match=r"DataLoader gave no batch"):
        inference_on_dataset(str, loader, Recorder())


def test_no_gradients_are_recorded_and_every_module_is_in_eval_mode():
    model, seen = mixed_mode_model(), []
    evaluator = Recorder(on_process=lambda: seen.append((torch.is_grad_enabled(), any(modes(model)))))
    inference_on_dataset(model, [torch.ones(3, 2)], evaluator)
    assert seen == [(False, False)]
    assert not evaluator.seen[0][1].requires_grad


def test_every_submodule_is_back_in_its_own_mode_after_evaluation():
    model = mixed_mode_model()
    before = modes(model)
    inference_on_dataset(model, [torch.ones(3, 2)], None)
    assert modes(model) == before
    assert modes(model.train()) != before  # what restoring the root's mode alone would give


def test_every_submodule_is_back_in_its_own_mode_after_a_failure():
    model = mixed_mode_model()
    before = modes(model)

    def fail():
        raise RuntimeError("evaluator broke")

    with pytest.raises(RuntimeError, match=r"evaluator broke"):
        inference_on_dataset(model, [torch.ones(3, 2)], Recorder(on_process=fail))
    assert modes(model) == before


def test_inference_context_is_eval_mode_and_gives_each_mode_back():
    model = mixed_mode_model()
    before = modes(model)
    with inference_context(model):
        assert not any(modes(model))
    assert modes(model) == before


def test_the_global_random_state_is_left_as_found_also_by_a_failure():
    before = rng_states()
    loader = torch.utils.data.DataLoader(torch.zeros(2, 1))  # draws a seed for its workers
    inference_on_dataset(lambda _: draw(), loader, Recorder())
    assert rng_states() == before
    with pytest.raises(ZeroDivisionError):
        inference_on_dataset(lambda _: draw() or 1 / 0, loader, Recorder())
    assert rng_states() == before
    draw()
    assert rng_states() != before


def test_inputs_are_moved_to_the_devices_of_the_model():
    model = nn.Linear(2, 1, device="meta")
    evaluator = Recorder()
    inference_on_dataset(nn.Sequential(Pick("x"), model), [{"x": torch.ones(3, 2)}], evaluator)
    inputs, outputs = evaluator.seen[0]
    assert inputs["x"].device.type == outputs.device.type == "meta"


class Pick(nn.Module):
    def __init__(self, key):
        super().__init__()
        self.key = key

    def forward(self, batch):
        return batch[self.key]


def test_the_callers_autocast_is_in_force():
    evaluator = Recorder()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inference_on_dataset(nn.Linear(2, 1), [torch.ones(3, 2)], evaluator)
    assert evaluator.seen[0][1].dtype == torch.bfloat16


def test_a_data_parallel_wrapper_is_looked_through():
    class Wrapper(nn.DataParallel):
        def forward(self, *inputs):
            pytest.fail("the wrapper's forward would communicate")

    assert inference_on_dataset(Wrapper(nn.Linear(2, 1)), [torch.ones(3, 2)], Recorder()) == {"seen": 1}


def test_progress_is_logged_every_five_seconds_with_an_eta_and_a_total_at_the_end(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def two_seconds(_):
        now[0] += 2.0

    with caplog.at_level(logging.INFO, logger="trainkit.evaluation"):
        inference_on_dataset(two_seconds, range(10), None)
    assert [record.getMessage() for record in caplog.records] == [
        "Start inference on 10 batches",
        "Inference done 3/10: 2.0000 s / batch (data 0.0000 s), ETA 0:00:14",
        "Inference done 6/10: 2.0000 s / batch (data 0.0000 s), ETA 0:00:08",
        "Inference done 9/10: 2.0000 s / batch (data 0.0000 s), ETA 0:00:02",
        "Total inference time: 0:00:20 (2.000000 s / batch on this rank, of which 0.000000 s waiting for data; "
        "10 batches)",
    ]


@pytest.mark.parametrize(
    ("loader", "name", "start", "end"),
    [
        ([1], "digits_val", "1 batch of digits_val", "1 batches)"),
        ([1, 2], "digits_val", "2 batches of digits_val", "2 batches)"),
        (iter([1]), "digits_val", "an unknown number of batches of digits_val", "1 batches)"),
        (iter([1]), "", "an unknown number of batches", "1 batches)"),
    ],
)
def test_the_log_says_of_which_dataset_how_many_batches_are_evaluated(caplog, loader, name, start, end):
    with caplog.at_level(logging.INFO, logger="trainkit.evaluation"):
        inference_on_dataset(lambda batch: None, loader, None, name=name)
    first, last = caplog.messages
    assert first == f"Start inference on {start}"
    assert last.endswith(f" s waiting for data; {end}")


def test_the_device_is_waited_for_once_and_not_per_batch(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    inference_on_dataset(nn.Linear(2, 1, device="meta"), [torch.ones(3, 2)] * 7, None)
    assert len(waits) == 1


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


def test_an_observer_that_stops_behind_the_last_batch_gets_the_results():
    observer = StopsBefore(2)
    with observe_inference(observer, "val"):
        assert inference_on_dataset(str, [5, 6], Recorder()) == {"seen": 2}
    assert observer.calls == [5, 6, {"seen": 2}]


def test_an_abandoned_evaluation_leaves_modes_and_the_random_state_as_found():
    model = mixed_mode_model()
    before = modes(model), rng_states()
    with pytest.raises(EvaluationAbandoned), observe_inference(StopsBefore(1), "val"):
        inference_on_dataset(model, [torch.ones(3, 2)] * 2, Recorder(on_process=draw))
    assert (modes(model), rng_states()) == before


class Ending(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return next(iter(())) if index == 5 else index


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make_loader", [DataLoader, partial(build_batch_data_loader, sampler=InferenceSampler(8))])
def test_a_sample_that_raises_stop_iteration_is_no_end_of_the_data_set(make_loader, num_workers):
    own = {} if make_loader is DataLoader else {"total_batch_size": 1}
    with pytest.raises(RuntimeError, match="StopIteration"):
        inference_on_dataset(lambda batch: batch, make_loader(Ending(), num_workers=num_workers, **own), Recorder())
