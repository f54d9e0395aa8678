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


def every_n(done, n, start=0):
    """The rule that OpenMMLab states for epochs and iterations, counted from 1; what comes first is never the 0th."""
    return n > 0 and done - start >= 0 and (done - start) % n == 0


def test_the_rule_is_that_of_openmmlab_for_every_period_and_offset():
    cases = [(done, n, start) for done in range(1, 30) for n in range(-1, 8) for start in range(12)]
    assert [is_nth(*case) for case in cases] == [every_n(*case) for case in cases]
    assert [periods_done(done, 3, 5) for done in (4, 5, 7, 8)] == [-1, 0, 0, 1]
    assert [is_nth(*case) for case in cases] != [
        every_n(done, n, start + 1) for done, n, start in cases
    ]


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


def test_no_period_ends_before_the_first_iteration_and_progress_is_said_in_words():
    assert not any(
        is_nth(done, period) for done in (0, -3) for period in (3, Period(Fraction(3, 2)))
    )
    said = say_done(1), say_done(2), say_done(0, 1), say_done(1, 2)
    assert said == (
        "after 1 iteration",
        "after 2 iterations",
        "after 0 of 1 iteration",
        "after 1 of 2 iterations",
    )


def test_anything_else_is_refused_by_the_name_of_the_argument():
    for period, minimum in ((-1, 0), (0, 1), (2.0, 0), ("2", 0), (True, 0)):
        message = f"eval_period must be a whole number >= {minimum}, got {period!r}"
        with pytest.raises(ValueError, match=message):
            check_period("eval_period", period, minimum=minimum)


def test_a_period_with_a_fraction_does_not_drift_and_is_readable():
    period = as_period(Fraction(10, 3))
    assert as_period(Fraction(6, 2)) == 3
    assert str(period) == "3.333 iterations"
    assert [done for done in range(1, 12) if is_nth(done, period)] == [3, 7, 10]
    assert copy.deepcopy(period) == pickle.loads(pickle.dumps(period)) == period
    assert check_period("period", period, minimum=1) is period


def test_a_length_is_rounded_to_at_least_one_iteration_but_for_zero():
    lengths = [0, Fraction(0), Fraction(1, 3), Period(Fraction(7, 3)), Fraction(7, 2), 5]
    assert [round_length(length) for length in lengths] == [0, 0, 1, 2, 4, 5]
    assert {type(round_length(length)) for length in lengths} == {int}


def test_times_have_units_and_other_texts_are_errors():
    texts = ["150m", "30min", "0.25d", "1h 3600s", "1d12h", "1h 1min 1s"]
    seconds = [9000, 1800, 21600, 7200, 129600, 3661]
    assert [parse_time(text, "MAX_TIME") for text in texts] == seconds
    for wrong in ("23", "h", "3x", "0h", "3h later", "3 h", "", -1, None, 3):
        with pytest.raises(ConfigError, match="MAX_TIME: got .*; accepted: a time above 0, such"):
            parse_time(wrong, "MAX_TIME")
