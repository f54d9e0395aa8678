import math

import pytest

from trainkit.utils.events import HistoryBuffer


def filled(values, **kwargs):
    history = HistoryBuffer(**kwargs)
    for value in values:
        history.update(value)
    return history


def test_median_is_over_the_last_values_and_the_mean_of_the_two_middle_ones():
    history = filled([100.0, 7.0, 1.0, 3.0])

    assert history.median(3) == 3.0
    assert history.median(4) == 5.0
    assert history.median(1) == 3.0
    assert history.median(1000) == 5.0


def test_average_is_over_the_last_values_and_global_average_over_all():
    history = filled([1.0, 2.0, 6.0])

    assert (history.avg(2), history.avg(1000), history.global_avg(), history.latest()) == (4.0, 3.0, 3.0, 6.0)


def test_a_full_history_holds_the_newest_values_and_its_global_average_counts_all():
    history = filled(range(1000), max_length=10)

    assert history.values() == [(value, value) for value in range(990, 1000)]
    assert history.median(1000) == 994.5
    assert history.global_avg() == 499.5  # (0 + ... + 999) / 1000


def test_iterations_default_to_the_number_of_values_so_far_also_when_old_ones_are_gone():
    history = filled([0.5] * 5, max_length=2)

    history.update(0.5, iteration=40)
    history.update(0.5)

    assert history.values() == [(0.5, 40), (0.5, 6)]


@pytest.mark.parametrize("position", range(5))
def test_median_of_a_window_with_nan_is_nan_wherever_it_stands(position):
    values = [5.0, 1.0, 4.0, 2.0]
    values.insert(position, math.nan)

    assert math.isnan(filled(values).median(5))


def test_median_is_a_number_again_once_nan_has_left_the_window():
    history = filled([1.0, math.nan, 3.0, 5.0])

    assert math.isnan(history.median(3))
    assert history.median(2) == 4.0


def test_median_of_infinite_values_is_infinite():
    assert filled([1.0, math.inf, math.inf]).median(3) == math.inf


def test_count_within_counts_iterations_and_not_values():
    history = HistoryBuffer()
    for iteration in (0, 10, 20, 29, 29, 30):
        history.update(1.0, iteration)

    counts = {window: history.count_within(window) for window in (1, 2, 10, 11, 20, 21, 31)}

    assert counts == {1: 1, 2: 3, 10: 3, 11: 4, 20: 4, 21: 5, 31: 6}


def test_a_history_without_room_is_refused():
    with pytest.raises(ValueError, match=r"max_length must be >= 1 value, got 0"):
        HistoryBuffer(max_length=0)
