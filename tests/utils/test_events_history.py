import io
import math

import pytest
import torch

from trainkit.utils.events import HistoryBuffer


def filled(values, **kwargs):
    history = HistoryBuffer(**kwargs)
    for value in values:
        history.update(value)
    return history


def test_median_and_average_are_over_the_last_values_and_the_global_average_over_all():
    history = filled([100.0, 7.0, 1.0, 3.0])

    assert [history.median(window) for window in (1, 3, 4, 1000)] == [3.0, 3.0, 5.0, 5.0]
    assert (history.avg(2), history.avg(1000), history.global_avg(), history.latest()) == (2.0, 27.75, 27.75, 3.0)


def test_a_full_history_holds_the_newest_values_and_its_global_average_counts_all():
    history = filled(range(1000), max_length=10)

    assert history.values() == [(value, value) for value in range(990, 1000)]
    assert (history.median(1000), history.global_avg()) == (994.5, 499.5)
    history.update(0.5, iteration=4000)
    history.update(0.5)
    assert history.values()[-2:] == [(0.5, 4000), (0.5, 1001)]
    with pytest.raises(ValueError, match="max_length must be >= 1 value, got 0"):
        HistoryBuffer(max_length=0)


def test_a_median_is_nan_as_long_as_nan_is_in_the_window_wherever_it_stands():
    for position in range(4):
        values = [5.0, 1.0, 2.0]
        values.insert(position, math.nan)
        assert math.isnan(filled(values).median(4))
        assert math.isnan(filled([*values, 7.0, 9.0]).median(3)) == (position == 3)
    assert filled([1.0, math.inf, math.inf]).median(3) == math.inf
    assert filled([math.inf, -math.inf, 1.0]).median(3) == 1.0


@pytest.mark.parametrize(
    ("iterations", "window", "count"),
    [
        ([0, 1, 2, 3, 4, 5], 3, 3),
        ([0, 1, 2, 3, 4, 5], 100, 6),
        ([0, 1, 2, 2, 2, 5], 3, 1),
        ([0, 1, 2, 3, 3, 3], 2, 4),
        ([0, 20, 40], 20, 1),
        ([0, 10, 20, 29, 29, 30], 10, 3),
        ([0, 10, 20, 29, 29, 30], 11, 4),
        ([0, 10, 20, 29, 29, 30], 31, 6),
    ],
)
def test_a_window_counts_iterations_and_not_values(iterations, window, count):
    history = HistoryBuffer()
    for iteration in iterations:
        history.update(0.0, iteration)
    assert history.count_within(window) == count


def read(history):
    """Everything that can be read, bit for bit."""
    numbers = [history.latest(), history.median(5), history.avg(7), history.global_avg()]
    return [number.hex() for number in numbers], history.count_within(4), repr(history.values())


@pytest.mark.parametrize("count", [1, 10, 11, 19, 20, 57])
def test_a_history_goes_on_bit_for_bit_after_a_round_trip_whatever_it_has_dropped(count):
    first, second = filled([0.1 * i for i in range(count)], max_length=10), filled([5.0], max_length=10)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)

    second.load_state_dict(state)

    assert read(second) == read(first)
    for history in (first, second):
        history.update(math.pi)
        history.update(0.7, iteration=1000)
    assert read(second) == read(first)
    assert (len(state["values"]), state["count"]) == (min(count, 10), count)  # a copy


def test_a_shorter_history_takes_the_newest_values_and_the_average_of_all():
    history = HistoryBuffer(max_length=2)
    history.load_state_dict(filled([6.0, 1.0, 2.0, 3.0]).state_dict())

    assert (history.values(), history.global_avg()) == ([(2.0, 2), (3.0, 3)], 3.0)
    history.update(4.0)
    assert history.values() == [(3.0, 3), (4.0, 4)]
    history.load_state_dict(HistoryBuffer().state_dict())
    assert history.values() == []
