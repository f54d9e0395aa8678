import math

import pytest

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Steps
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import EarlyStopping, EvalHook


def run(values, max_iter=40, **kwargs):
    """Evaluate every 2nd iteration; returns the trainer and how often it was evaluated."""
    relative = kwargs.pop("relative", None)
    if relative:
        kwargs["min_delta_mode"] = "rel"
    if "start" in kwargs or "divergence" in kwargs or relative:
        max_iter = 20
        values = [*values, *[values[-1] + i for i in range(1, 11 - len(values))]]
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
        # evaluations after 2, 4, 6, ... iterations; those before the first one are as if they were not there
        ([9, 1, 2, 3, 3, 3], {"patience": 2, "start": 6}, (12, 6)),
        ([9, 9, 9, 9, 9], {"patience": 2, "start": 5}, (10, 5)),
        ([0, 9, 9, 9, 9], {"patience": 9, "start": 3, "divergence": 1}, (20, 10)),
        ([5, 4, 2.9, 5], {"patience": 9, "divergence": 3}, (6, 3)),  # worse than 3: below
        ([5, 4, 3, 3.1, 5], {"patience": 9, "divergence": 3, "mode": "min"}, (2, 1)),
        ([2, 3, 3.1, 5], {"patience": 9, "divergence": 3, "mode": "min"}, (6, 3)),
        ([math.nan, 4, math.inf, 2, 9], {"patience": 9, "divergence": 3}, (8, 4)),
        # better by 10 % of the best: of 10 by 1, of 12 by 1.2, also of negative numbers
        ([10, 10.9, 12, 13.1, 13.1], {"patience": 2, "min_delta": 0.1, "relative": True}, (10, 5)),
        ([-10, -9.1, -9.05], {"patience": 2, "min_delta": 0.1, "relative": True}, (6, 3)),
        ([-10, -8.9, -8.5, -8], {"patience": 2, "min_delta": 0.1, "relative": True}, (20, 10)),
        (
            [8, 7.3, 7.1, 6.5, 6.4, 6.4],
            {"patience": 2, "min_delta": 0.1, "relative": True, "mode": "min"},
            (10, 5),
        ),
        (
            [-8, -8.7, -8.9, -9, -9.7],
            {"patience": 2, "min_delta": 0.1, "relative": True, "mode": "min"},
            (10, 5),
        ),
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
        "metric": "top1",
        "mode": "max",
        "best": 5.0,
        "best_iter": 1,
        "not_better": 1,
        "seen_iter": 3,
    }
    first.train(6, 40)
    assert first.iter == 10
    resumed = make([4, 4, 4])
    resumed.load_state_dict(state)
    resumed.train(6, 40)
    assert resumed.iter == 10
    anew = make([4, 4, 4, 4])
    anew.load_state_dict(state)
    anew.train(0, 40)
    assert anew.iter == 8


def test_values_before_the_start_are_forgotten_over_a_resume_too():
    def make(values):
        results = iter(values)
        hook = EarlyStopping(2, "top1", patience=2, start=6)
        return Steps([EvalHook(2, lambda: {"top1": next(results)}), hook]), hook

    first, hook = make([9, 9, 1])
    first.train(0, 5)  # the third value is of the final evaluation, after 5 iterations
    assert hook.best is None
    assert hook.not_better == 0
    second, hook = make([1, 2, 1, 1, 5])
    second.load_state_dict(first.state_dict())
    second.train(5, 20)
    assert second.iter == 12
    assert hook.best == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": -1}, "start must be .* got -1"),
        ({"start": 0.5}, "start must be .* got 0.5"),
        ({"divergence": math.nan}, r"divergence must be a number in \(-inf, inf\), got nan"),
        ({"divergence": "high"}, r"divergence must be a number in \(-inf, inf\), got 'high'"),
        ({"threshold": math.inf}, r"threshold must be a number in \(-inf, inf\), got inf"),
        ({"min_delta": -0.1}, r"min_delta must be a number in \[0, inf\), got -0.1"),
        ({"min_delta": math.nan}, r"min_delta must be a number in \[0, inf\), got nan"),
        ({"min_delta_mode": "relative"}, "min_delta_mode must be 'abs' or 'rel', got 'relative'"),
        (
            {"threshold": 1.0, "divergence": 2.0},
            "the divergence 2.0 is not worse than the threshold 1.0",
        ),
        ({"patience": 0}, "patience must be a whole number >= 1"),
    ],
)
def test_an_argument_out_of_its_range_is_an_error_of_the_constructor(arguments, message):
    with pytest.raises(ValueError, match=message):
        EarlyStopping(1, "top1", **arguments)


def test_a_config_gives_the_arguments_and_has_their_ranges(tmp_path):
    keys = {
        "METRIC": "classification/top1",
        "PATIENCE": 9,
        "MIN_DELTA": 0.1,
        "MIN_DELTA_MODE": "rel",
        "DIVERGENCE": 101.0,
        "START": "1ep",
    }
    options = [item for key, value in keys.items() for item in (f"EARLY_STOPPING.{key}", value)]
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *options, "TEST.EVAL_PERIOD", 2))
    assert trainer.cfg.EARLY_STOPPING.START == 5
    trainer.train()
    assert trainer.iter == 6  # of 10: top1 is below 101 in the evaluation after 6 iterations
    for key, value in [
        ("START", -1),
        ("START", 1.5),
        ("MIN_DELTA_MODE", "relative"),
        ("DIVERGENCE", math.inf),
        ("MIN_DELTA", -1.0),
    ]:
        cfg = tiny_cfg(tmp_path, *options)
        cfg.EARLY_STOPPING[key] = value
        with pytest.raises(ConfigError, match=f"EARLY_STOPPING.{key}: got {value!r}"):
            DefaultTrainer(cfg)
