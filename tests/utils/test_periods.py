"""The one rule of all that happens every so often."""

import copy
import pickle
from fractions import Fraction
from types import SimpleNamespace

import pytest

from trainkit.config import ConfigError
from trainkit.utils.periods import (
    Period,
    as_period,
    check_period,
    is_due,
    is_last,
    is_nth,
    parse_time,
    periods_done,
    round_length,
    say_done,
)


@pytest.mark.parametrize("period", range(1, 8))
@pytest.mark.parametrize("start", range(12))
def test_the_rule_is_that_of_openmmlab_for_every_period_and_offset(period, start):
    """Counted from 1: after ``start`` and each ``period`` iterations that follow it."""
    expected = {*range(start, 30, period)} - {0}
    assert {done for done in range(1, 30) if is_nth(done, period, start)} == expected


@pytest.mark.parametrize("period", [-1, 0])
def test_nothing_happens_every_0_iterations(period):
    assert not any(is_nth(done, period, start) for done in range(1, 30) for start in range(12))


@pytest.mark.parametrize(("done", "expected"), [(4, -1), (5, 0), (7, 0), (8, 1)])
def test_periods_are_counted_from_the_offset(done, expected):
    assert periods_done(done, 3, 5) == expected


def trainer_at(iter, max_iter=10, iters_per_epoch=3):
    epoch = periods_done(iter, iters_per_epoch)
    return SimpleNamespace(
        iter=iter, max_iter=max_iter, iters_per_epoch=iters_per_epoch, epoch=epoch
    )


def iters_in_which(rule):
    return [iter for iter in range(10) if rule(trainer_at(iter))]


def test_an_iteration_is_counted_from_0_and_is_due_when_it_is_the_last_of_a_period():
    assert iters_in_which(lambda trainer: is_due(trainer, 4)) == [3, 7]
    assert iters_in_which(lambda trainer: is_due(trainer, 4, or_last=True)) == [3, 7, 9]
    assert iters_in_which(lambda trainer: is_due(trainer, 2, offset=5)) == [4, 6, 8]
    assert iters_in_which(lambda trainer: is_due(trainer, 2, offset=5, or_last=True)) == [
        4,
        6,
        8,
        9,
    ]
    assert iters_in_which(lambda trainer: is_due(trainer, 0)) == []
    assert iters_in_which(lambda trainer: is_due(trainer, 0, or_last=True)) == [9]
    assert [iter for iter in range(12) if is_last(trainer_at(iter))] == [9, 10, 11]


@pytest.mark.parametrize(
    "per_epoch", [Fraction(4, 3), Fraction(5, 2), Fraction(341, 399), Fraction(7)]
)
def test_a_period_that_is_not_whole_ends_at_its_rounded_multiples(per_epoch):
    for offset in (0, 3 * per_epoch):
        ends = {round(offset + n * per_epoch) for n in range(0 if offset else 1, 400)} - {0}
        assert {done for done in range(100) if is_nth(done, per_epoch, offset)} == {
            end for end in ends if end < 100
        }
    starts = [0, *(max(1, round(n * per_epoch)) for n in range(1, 400))]
    assert [trainer_at(iter, iters_per_epoch=per_epoch).epoch for iter in range(100)] == [
        max(n for n, start in enumerate(starts) if start <= iter) for iter in range(100)
    ]


@pytest.mark.parametrize("period", [3, Period(Fraction(3, 2))])
def test_no_period_ends_before_the_first_iteration(period):
    assert not is_nth(0, period)
    assert not is_nth(-3, period)


@pytest.mark.parametrize(
    ("progress", "said"),
    [
        ((1,), "after 1 iteration"),
        ((2,), "after 2 iterations"),
        ((0, 1), "after 0 of 1 iteration"),
        ((1, 2), "after 1 of 2 iterations"),
    ],
)
def test_progress_is_said_in_words(progress, said):
    assert say_done(*progress) == said


@pytest.mark.parametrize(
    ("period", "minimum"),
    [
        (-1, 0),
        (0, 1),
        (2.0, 0),
        ("2", 0),
        (True, 0),
    ],
)
def test_anything_else_is_refused_by_the_name_of_the_argument(period, minimum):
    with pytest.raises(ValueError, match=rf"eval_period .* >= {minimum}, got {period!r}"):
        check_period("eval_period", period, minimum=minimum)


def test_a_period_with_a_fraction_does_not_drift_and_is_readable():
    period = as_period(Fraction(10, 3))
    assert as_period(Fraction(6, 2)) == 3
    assert str(period) == "3.333 iterations"
    assert [done for done in range(1, 12) if is_nth(done, period)] == [3, 7, 10]
    assert copy.deepcopy(period) == pickle.loads(pickle.dumps(period)) == period
    assert check_period("period", period, minimum=1) is period


@pytest.mark.parametrize(
    ("length", "rounded"),
    [
        (0, 0),
        (Fraction(0), 0),
        (Fraction(1, 3), 1),
        (Period(Fraction(7, 3)), 2),
        (Fraction(7, 2), 4),
        (5, 5),
    ],
)
def test_a_length_is_rounded_to_at_least_one_iteration_but_for_zero(length, rounded):
    assert round_length(length) == rounded
    assert type(round_length(length)) is int


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("150m", 9000),
        ("30min", 1800),
        ("0.25d", 21600),
        ("1h 3600s", 7200),
        ("1d12h", 129600),
        ("1h 1min 1s", 3661),
    ],
)
def test_times_have_units(text, seconds):
    assert parse_time(text, "MAX_TIME") == seconds


@pytest.mark.parametrize(
    "wrong", ["23", "h", "3x", "0h", "3h later", "3 h", "", -1, None, 3], ids=repr
)
def test_another_text_for_a_time_is_an_error(wrong):
    with pytest.raises(ConfigError, match="MAX_TIME: got .*; accepted: a time above 0"):
        parse_time(wrong, "MAX_TIME")
