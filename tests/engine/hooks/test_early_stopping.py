import math

import pytest

from tests.engine.tiny import Steps
from trainkit.engine.hooks import EarlyStopping, EvalHook


def run(values, max_iter=40, **kwargs):
    """Evaluate every 2nd iteration; returns the trainer and how often it was evaluated."""
    results = iter(values)
    trainer = Steps(
        [EvalHook(2, lambda: {"top1": next(results)}), EarlyStopping(2, "top1", **kwargs)]
    )
    trainer.train(0, max_iter)
    assert trainer.status == "finished"
    assert trainer.max_iter == trainer.iter
    return trainer.iter, len(values) - len([*results])


@pytest.mark.parametrize(
    ("values", "kwargs", "expected"),
    [
        ([1, 2, 3, 3, 2, 3, 9], {}, (12, 6)),
        ([3, 2, 2, 1, 1, 1], {"mode": "min", "patience": 2}, (12, 6)),
        ([1, math.nan, math.inf, 2, 2, -math.inf], {"mode": "auto", "patience": 2}, (6, 3)),
        ([2.0, 1.75, 1.25, 1.0, 1.125], {"patience": 2, "min_delta": 0.5, "mode": "min"}, (10, 5)),
        ([math.inf, math.nan, 2.5, 3, 4], {"threshold": 2.5}, (8, 4)),  # to reach it is not enough
        ([3, 2, 1, 0], {"threshold": 1.5, "mode": "min"}, (6, 3)),
        ([1, 1, 1, 5], {"threshold": 2.5, "patience": 2}, (6, 3)),
        ([1, -math.inf, 1, 1], {"check_finite": True}, (4, 2)),
    ],
)
def test_it_stops_after_evaluations_without_a_better_value_or_past_a_threshold(
    values, kwargs, expected
):
    assert run(values, **kwargs) == expected


def test_an_evaluation_counts_once_however_often_it_is_looked_at_and_the_last_one_stops_nothing():
    trainer = Steps(
        [EvalHook(4, lambda: {"top1": 1}, eval_at_start=True), EarlyStopping(1, "top1", patience=2)]
    )
    trainer.train(0, 40)
    assert trainer.iter == 8
    assert run([2, 1], max_iter=4, patience=1) == (4, 2)


def test_it_counts_on_in_the_same_process_and_in_a_resumed_run_and_a_new_run_starts_anew():
    def make(values):
        results = iter(values)
        return Steps(
            [EvalHook(2, lambda: {"top1": next(results)}), EarlyStopping(2, "top1", patience=3)]
        )

    first = make([5, 4, 4, 4, 4])
    first.train(0, 6)  # the third value is of the final evaluation
    state = first.state_dict()
    assert state["hooks"]["EarlyStopping"] == {
        **{"metric": "top1", "mode": "max"},
        **{"best": 5.0, "best_iter": 1, "not_better": 1, "seen_iter": 3},
    }
    first.train(6, 40)
    ends = [first.iter]
    for values, start_iter in (([4, 4, 4], 6), ([4, 4, 4, 4], 0)):
        trainer = make(values)
        trainer.load_state_dict(state)
        trainer.train(start_iter, 40)
        ends.append(trainer.iter)
    assert ends == [10, 10, 8]
