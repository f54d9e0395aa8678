"""Who looks on while a model is run over a data set."""

import pytest

from trainkit.evaluation import DatasetEvaluator, inference_on_dataset, observe_inference
from trainkit.evaluation.observer import InferenceObserver


class Observer(InferenceObserver):
    """Notes every call, and fails at one of the points."""

    def __init__(self, fail_at=None):
        self.calls, self.fail_at = [], fail_at

    def _note(self, *call):
        self.calls.append(call)
        if call[0] == self.fail_at:
            raise OSError(call[0])

    def before_eval(self, phase, name):
        self._note("before_eval", phase, name)

    def before_eval_step(self, phase, index, inputs):
        self._note("before_eval_step", phase, index, inputs)

    def after_eval_step(self, phase, index, inputs, outputs):
        self._note("after_eval_step", phase, index, inputs, outputs)

    def after_eval(self, phase, name, results):
        self._note("after_eval", phase, name, results)


class Count(DatasetEvaluator):
    def reset(self):
        self.num = 0

    def process(self, inputs, outputs):
        self.num += 1

    def evaluate(self):
        return {"task": {"num": self.num}}


def calls_of_one(phase, name, batch):
    return [
        ("before_eval", phase, name),
        ("before_eval_step", phase, 0, batch),
        ("after_eval_step", phase, 0, batch, str(batch)),
        ("after_eval", phase, name, {}),
    ]


def test_an_observer_sees_every_batch_before_and_behind_the_model_and_the_results():
    observer = Observer()
    with observe_inference(observer, "val"):
        inference_on_dataset(str, [5, 6], Count(), name="cats")

    assert observer.calls == [
        ("before_eval", "val", "cats"),
        ("before_eval_step", "val", 0, 5),
        ("after_eval_step", "val", 0, 5, "5"),
        ("before_eval_step", "val", 1, 6),
        ("after_eval_step", "val", 1, 6, "6"),
        ("after_eval", "val", "cats", {"task": {"num": 2}}),
    ]


def test_the_points_lie_around_model_and_evaluator():
    order = []

    class Noting(DatasetEvaluator):
        def process(self, inputs, outputs):
            order.append("process")

        def evaluate(self):
            order.append("evaluate")
            return {}

    class Order(Observer):
        def _note(self, point, *_):
            order.append(point)

    with observe_inference(Order(), "test"):
        inference_on_dataset(lambda batch: order.append("model"), [1], Noting())

    assert order == [
        *("before_eval", "before_eval_step", "model", "process", "after_eval_step", "evaluate", "after_eval"),
    ]


def test_nobody_is_called_outside():
    observer = Observer()
    inference_on_dataset(str, [1], None)
    with observe_inference(observer, "val"):
        pass
    inference_on_dataset(str, [1], None)

    assert observer.calls == []


def test_of_nested_observers_the_innermost_counts_and_then_the_outer_one_again():
    outer, inner = Observer(), Observer()
    with observe_inference(outer, "val"):
        inference_on_dataset(str, [1], None, name="a")
        with observe_inference(inner, "test"):
            inference_on_dataset(str, [2], None, name="b")
        inference_on_dataset(str, [3], None, name="c")

    assert outer.calls == [*calls_of_one("val", "a", 1), *calls_of_one("val", "c", 3)]
    assert inner.calls == calls_of_one("test", "b", 2)


def test_an_evaluation_inside_a_point_is_told_to_the_same_observer():
    class Nesting(Observer):
        def after_eval_step(self, phase, index, inputs, outputs):
            super().after_eval_step(phase, index, inputs, outputs)
            if inputs == 1:
                inference_on_dataset(str, [2], None, name="inner")

    observer = Nesting()
    with observe_inference(observer, "val"):
        inference_on_dataset(str, [1], None, name="outer")

    outer = calls_of_one("val", "outer", 1)
    assert observer.calls == [*outer[:3], *calls_of_one("val", "inner", 2), outer[3]]


@pytest.mark.parametrize("fail_at", ["before_eval", "before_eval_step", "after_eval_step", "after_eval"])
def test_an_observer_that_fails_ends_the_evaluation_and_is_not_asked_again(fail_at):
    failing, outer = Observer(fail_at), Observer()
    with observe_inference(outer, "test"):
        with pytest.raises(OSError, match=fail_at), observe_inference(failing, "val"):
            inference_on_dataset(str, [1], None, name="a")
        inference_on_dataset(str, [1], None, name="b")

    assert failing.calls == calls_of_one("val", "a", 1)[: len(failing.calls)]
    assert failing.calls[-1][0] == fail_at
    assert outer.calls == calls_of_one("test", "b", 1)


def test_an_evaluation_that_fails_has_no_end():
    observer = Observer()
    with pytest.raises(ValueError, match="gave no batch"), observe_inference(observer, "val"):
        inference_on_dataset(str, [], None, name="empty")

    assert observer.calls == [("before_eval", "val", "empty")]
