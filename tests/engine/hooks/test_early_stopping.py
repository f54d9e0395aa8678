import math

import pytest

from tests.engine.tiny import Steps
from trainkit.engine.hooks import EarlyStopping, EvalHook


def run(values, max_iter=40, **kwargs):
    """Evaluate every 2nd iteration; returns the trainer and how often it was evaluated."""
    evaluations = []
    results = iter(values)

    def evaluate():
        evaluations.append(trainer.iter)
        return {"top1": next(results)}

    trainer = Steps([EvalHook(2, evaluate), EarlyStopping(2, "top1", **kwargs)])
    trainer.train(0, max_iter)
    assert trainer.status == "finished"
    assert trainer.max_iter == trainer.iter
    return trainer.iter, len(evaluations)


@pytest.mark.parametrize(
    ("values", "kwargs", "expected"),
    [
        ([1, 2, 3, 3, 2, 3, 9], {}, (12, 6)),
        ([1, 2, 3, 3, 2, 3, 9], {"patience": 2}, (10, 5)),
        ([1, 2, 3, 3, 2, 3, 9], {"patience": 1}, (8, 4)),
        ([3, 2, 2, 1, 1, 1], {"mode": "min", "patience": 2}, (12, 6)),
        ([1, math.nan, math.inf, 2, 2, -math.inf], {"patience": 2}, (6, 3)),
        ([1.0, 1.25, 1.5, 1.75, 2.0, 2.0, 2.0], {"patience": 2, "min_delta": 0.25}, (14, 7)),
        ([1.0, 1.25, 1.25], {"patience": 2, "min_delta": 0.25}, (6, 3)),
        ([2.0, 1.75, 1.25, 1.0, 1.125], {"patience": 2, "min_delta": 0.5, "mode": "min"}, (10, 5)),
        ([1, 2, 1, 1], {"mode": "auto", "patience": 2}, (8, 4)),
    ],
)
def test_it_stops_after_so_many_evaluations_without_a_better_value(values, kwargs, expected):
    assert run(values, **kwargs) == expected


@pytest.mark.parametrize(
    ("values", "kwargs", "expected"),
    [
        ([1, 2, 3, 4], {"threshold": 2.5}, (6, 3)),
        ([1, 2, 2.5, 3, 4], {"threshold": 2.5}, (8, 4)),  # to reach it is not enough
        ([3, 2, 1, 0], {"threshold": 1.5, "mode": "min"}, (6, 3)),
        ([math.inf, math.nan, 1, 3], {"threshold": 2.5}, (8, 4)),
        ([1, 1, 1, 5], {"threshold": 2.5, "patience": 2}, (6, 3)),
        ([1, math.nan, 1, 1], {"check_finite": True}, (4, 2)),
        ([1, -math.inf, 1, 1], {"check_finite": True}, (4, 2)),
        ([1, 2, 3, 4], {"check_finite": True, "threshold": 3.5}, (8, 4)),
    ],
)
def test_it_stops_when_a_threshold_is_passed_or_a_value_is_not_finite(values, kwargs, expected):
    assert run(values, **kwargs) == expected


@pytest.mark.parametrize(
    ("values", "kwargs", "reason"),
    [
        ([3], {"threshold": 2}, "top1 is 3.0, which is better than the threshold 2"),
        ([math.nan], {"check_finite": True}, "top1 is nan"),
    ],
)
def test_the_log_says_why_else_it_stopped(caplog, values, kwargs, reason):
    caplog.set_level("INFO")
    run(values, **kwargs)
    assert f"Stopped after 2 of 40 iterations: {reason}" in caplog.messages


def test_a_stopped_run_can_go_on_and_is_stopped_again():
    results = iter([5, 4, 4, 3, 6, 4, 4])
    trainer = Steps([EvalHook(2, lambda: {"top1": next(results)}), EarlyStopping(2, "top1", patience=2)])
    trainer.train(0, 40)
    assert trainer.iter == 6
    trainer.train(6, 40)
    assert trainer.iter == 8  # the count goes on
    trainer.train(8, 40)
    assert trainer.iter == 14


def test_an_evaluation_counts_once_however_often_it_is_looked_at():
    trainer = Steps(
        [EvalHook(4, lambda: {"top1": 1}, eval_at_start=True), EarlyStopping(1, "top1", patience=2)],
    )
    trainer.train(0, 40)
    assert trainer.iter == 8


def test_the_last_iteration_stops_nothing():
    assert run([2, 1], max_iter=4, patience=1) == (4, 2)


def test_its_state_counts_on_in_a_resumed_run_and_a_new_run_begins_anew():
    def make(values):
        results = iter(values)
        return Steps([EvalHook(2, lambda: {"top1": next(results)}), EarlyStopping(2, "top1", patience=3)])

    first = make([5, 4, 4, 4])
    first.train(0, 6)  # the third value is of the final evaluation
    state = first.state_dict()
    assert state["hooks"] == {
        "EarlyStopping": {
            **{"metric": "top1", "mode": "max"},
            **{"best": 5.0, "best_iter": 1, "not_better": 1, "seen_iter": 3},
        },
        "EvalHook": {"evaluated_iters": 6},
    }

    second = make([4, 4, 4])
    second.load_state_dict(state)
    second.train(6, 40)
    assert second.iter == 10

    third = make([4, 4, 4, 4])
    third.load_state_dict(state)
    third.train(0, 40)
    assert third.iter == 8


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("eval_period", 0), ("val_metric", 5), ("mode", "best"), ("patience", 0), ("patience", 2.5)),
        *(("min_delta", -0.1), ("min_delta", "2"), ("threshold", math.nan), ("threshold", "2")),
    ],
)
def test_a_wrong_argument_is_an_error_of_the_constructor(argument, value):
    with pytest.raises(ValueError, match=f"{argument} .*got .*{value!r}"):
        EarlyStopping(**{"eval_period": 1, "val_metric": "top1", argument: value})
