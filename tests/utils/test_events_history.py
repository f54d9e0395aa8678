import math

import pytest

from trainkit.utils.events import HistoryBuffer


def filled(values, **kwargs):
    history = HistoryBuffer(**kwargs)
    for value in values:
        history.update(value)
    return history


def test_median_and_average_are_over_the_last_values_and_the_global_average_over_all():
    history = filled([100.0, 7.0, 1.0, 3.0])
    assert history.median(1) == 3.0
    assert history.median(3) == 3.0
    assert history.median(4) == 5.0
    assert history.median(1000) == 5.0
    assert history.avg(2) == 2.0
    assert history.avg(1000) == 27.75
    assert history.global_avg() == 27.75
    assert history.latest() == 3.0


def test_a_median_that_was_read_before_counts_the_values_since():
    history = filled([1.0, 2.0, 3.0])
    assert history.median(2) == 2.5
    history.update(9.0)
    assert history.median(2) == 6.0
    history.load_state_dict(filled([4.0, 8.0, 5.0, 5.0]).state_dict())
    assert history.median(2) == 5.0


def test_a_full_history_holds_the_newest_values_and_its_global_average_counts_all():
    history = filled(range(1000), max_length=10)
    assert history.values() == [(value, value) for value in range(990, 1000)]
    assert history.median(1000) == 994.5
    assert history.global_avg() == 499.5
    history.update(0.5, iteration=4000)
    history.update(0.5)
    assert history.values()[-2:] == [(0.5, 4000), (0.5, 1001)]
    with pytest.raises(ValueError, match="max_length must be >= 1 value, got 0"):
        HistoryBuffer(max_length=0)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("values", "median", "left_out"),
    [
        ([NAN, 5.0, 1.0], 3.0, 1),
        ([5.0, NAN, 1.0], 3.0, 1),
        ([5.0, 1.0, NAN], 3.0, 1),
        ([INF, -INF, 1.0], 1.0, 2),
        ([INF, INF, INF, 2.0, 4.0, 9.0], 4.0, 3),
        ([1e308, 1e308, 1e308], 1e308, 0),  # only their sum is too large
        ([7.0, 3.0], 5.0, 0),
    ],
)
def test_a_median_is_of_the_finite_values_wherever_the_others_stand_and_the_others_are_counted(
    values, median, left_out
):
    history = filled(values)
    assert history.median(100) == median
    assert history.count_not_finite(100) == left_out


@pytest.mark.parametrize(
    ("values", "newest"),
    [
        ([INF, NAN], NAN),
        ([NAN, INF], INF),
        ([NAN, INF, -INF], -INF),
    ],
)
def test_a_median_is_the_newest_value_if_none_is_finite(values, newest):
    assert filled(values).median(100) == pytest.approx(newest, nan_ok=True)
    assert filled(values).count_not_finite(100) == len(values)


def test_a_value_outside_of_the_window_is_not_counted():
    history = filled([math.inf, 1.0, 2.0])
    assert history.median(2) == 1.5
    assert history.count_not_finite(2) == 0


def test_a_mean_has_every_value_so_one_that_is_not_finite_shows_in_it():
    history = filled([1.0, math.inf, 3.0])
    assert history.avg(1) == 3.0
    assert history.avg(3) == math.inf
    assert history.global_avg() == math.inf
    assert math.isnan(filled([1.0, math.nan]).global_avg())


@pytest.mark.parametrize(
    ("iterations", "counts"),
    [
        ([0, 1, 2, 3, 4, 5], {3: 3, 100: 6}),
        ([0, 1, 2, 2, 2, 5], {3: 1}),
        ([0, 1, 2, 3, 3, 3], {2: 4}),
        ([0, 10, 20, 29, 29, 30], {10: 3, 11: 4, 31: 6}),
    ],
)
def test_a_window_counts_iterations_and_not_values(iterations, counts):
    history = HistoryBuffer()
    for iteration in iterations:
        history.update(0.0, iteration)
    assert {window: history.count_within(window) for window in counts} == counts


def read(history):
    """Everything that can be read, bit for bit."""
    numbers = [history.latest(), history.median(5), history.avg(7), history.global_avg()]
    return [number.hex() for number in numbers], history.count_within(4), repr(history.values())


@pytest.mark.parametrize("count", [1, 10, 19, 57])
def test_a_history_goes_on_bit_for_bit_after_a_round_trip_whatever_it_has_dropped(count):
    first, second = (
        filled([0.1 * i for i in range(count)], max_length=10),
        filled([5.0], max_length=10),
    )
    state = first.state_dict()
    second.load_state_dict(state)
    shorter = HistoryBuffer(max_length=1)
    shorter.load_state_dict(state)
    assert shorter.values() == first.values()[-1:]
    assert shorter.global_avg() == first.global_avg()
    assert read(second) == read(first)
    for history in (first, second):
        history.update(math.pi)
        history.update(0.7, iteration=1000)
    assert read(second) == read(first)
    assert len(state["values"]) == min(count, 10)
    assert state["count"] == count  # a copy
