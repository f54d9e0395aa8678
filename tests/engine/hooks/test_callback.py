import pytest

from tests.engine.tiny import Regression, Steps, batches, sgd
from trainkit.engine.hooks import CallbackHook
from trainkit.engine.step import SimpleTrainer


def test_every_point_calls_its_function_with_the_trainer_in_each_run():
    calls = []

    def note(point):
        return lambda trainer: calls.append((point, trainer.iter))

    points = ("before_train", "before_step", "after_backward", "after_step", "after_train")
    model = Regression()
    trainer = SimpleTrainer(model, batches(2), sgd(model))
    trainer.register_hooks([CallbackHook(**{point: note(point) for point in points})])
    expected = [
        ("before_train", 3),
        ("before_step", 3),
        ("after_backward", 3),
        ("after_step", 3),
        ("before_step", 4),
        ("after_backward", 4),
        ("after_step", 4),
        ("after_train", 5),
    ]
    trainer.train(3, 5)
    assert calls == expected
    trainer.train(3, 5)
    assert calls == expected * 2


def test_where_no_function_is_given_nothing_is_called():
    trainer = Steps([CallbackHook(after_step=lambda trainer: None, before_step=None)])
    points = [line.split()[:2] for line in trainer.describe_hooks().splitlines()]
    assert points == [["after_step", "CallbackHook"], ["--", "save"]]


@pytest.mark.parametrize("wrong", [{"after_epok": print}, {"after_step": 5}])
def test_an_unknown_point_and_what_is_no_function_are_errors(wrong):
    with pytest.raises(TypeError, match="accepted: a function for one of before_train, before_epoch"):
        CallbackHook(**wrong)
