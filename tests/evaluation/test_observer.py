"""Who looks on while a model is run over a data set."""

import pytest

from trainkit.evaluation import DatasetEvaluator, inference_on_dataset, observe_inference
from trainkit.evaluation.observer import InferenceObserver


class Observer(InferenceObserver):
    """Notes every call."""

    def __init__(self):
        self.calls = []

    def _note(self, *call):
        self.calls.append(call)

    def before_eval(self, phase, name):
        self._note("before_eval", phase, name)

    def before_eval_step(self, phase, index, inputs):
        self._note("before_eval_step", phase, index, inputs)

    def after_eval_step(self, phase, index, inputs, outputs):
        self._note("after_eval_step", phase, index, inputs, outputs)

    def after_eval(self, phase, name, results):
        self._note("after_eval", phase, name, results)


def test_an_observer_sees_every_batch_and_the_results_around_the_model_and_the_evaluator():
    observer, outer = Observer(), Observer()

    class Noting(DatasetEvaluator):
        def process(self, inputs, outputs):
            observer.calls.append("process")

        def evaluate(self):
            observer.calls.append("evaluate")
            return {"task": {}}

    def model(batch):
        observer.calls.append("model")
        return str(batch) if batch < 7 else 1 / 0

    with observe_inference(outer, "val"):
        with observe_inference(observer, "val"):
            inference_on_dataset(model, [5, 6], Noting(), name="cats")
        assert observer.calls == [
            ("before_eval", "val", "cats"),
            ("before_eval_step", "val", 0, 5),
            "model",
            "process",
            ("after_eval_step", "val", 0, 5, "5"),
            ("before_eval_step", "val", 1, 6),
            "model",
            "process",
            ("after_eval_step", "val", 1, 6, "6"),
            "evaluate",
            ("after_eval", "val", "cats", {"task": {}}),
        ]
        with pytest.raises(ZeroDivisionError), observe_inference(observer, "val"):
            inference_on_dataset(model, [7], None)
        inference_on_dataset(str, [1], None, name="b")
    inference_on_dataset(str, [1], None)  # nobody looks on
    assert outer.calls == [  # also after a failure
        ("before_eval", "val", "b"),
        ("before_eval_step", "val", 0, 1),
        ("after_eval_step", "val", 0, 1, "1"),
        ("after_eval", "val", "b", {}),
    ]
