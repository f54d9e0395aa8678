import pytest

from tests.engine.tiny import Regression, Steps, batches, sgd
from trainkit.engine.hooks import CallbackHook
from trainkit.engine.step import SimpleTrainer


def test_every_point_calls_its_function_with_the_trainer():
    calls = []

    def note(point):
        return lambda trainer: calls.append((point, trainer.iter))

    points = ("before_train", "before_step", "after_backward", "after_step", "after_train")
    model = Regression()
    trainer = SimpleTrainer(model, batches(2), sgd(model))
    trainer.register_hooks([CallbackHook(**{point: note(point) for point in points})])
    trainer.train(3, 5)
    in_steps = [(point, iter) for iter in (3, 4) for point in points[1:4]]
    assert calls == [("before_train", 3), *in_steps, ("after_train", 5)]


def test_where_no_function_is_given_nothing_is_called():
    trainer = Steps([CallbackHook(after_step=lambda trainer: None, before_step=None)])
    points = [line.split()[:2] for line in trainer.describe_hooks().splitlines()]
    assert points == [["after_step", "CallbackHook"], ["--", "save"]]


def test_an_unknown_point_is_an_error():
    with pytest.raises(TypeError, match="got 'after_epok'; accepted: before_train, before_epoch"):
        CallbackHook(after_epok=print)
