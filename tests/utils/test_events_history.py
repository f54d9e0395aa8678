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


# ---------------------------------------------------------------------- state


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def read(history):
    """Everything that can be read, bit for bit."""
    numbers = [history.latest(), history.median(5), history.avg(7), history.global_avg()]
    return [number.hex() for number in numbers], history.count_within(4), repr(history.values())


def put_more(history):
    for value in [0.3, -7.1, math.pi]:
        history.update(value)
    history.update(0.7, iteration=1000)


@pytest.mark.parametrize("count", [1, 9, 10, 11, 19, 20, 57])
def test_a_history_goes_on_bit_for_bit_after_a_round_trip_whatever_it_has_dropped(count):
    first = filled([0.1 * i for i in range(count)], max_length=10)
    second = filled([5.0], max_length=10)
    assert read(second) != read(first)

    second.load_state_dict(through_a_file(first.state_dict()))

    assert read(second) == read(first)
    put_more(first)
    assert read(second) != read(first)
    put_more(second)
    assert read(second) == read(first)


def test_the_state_has_the_held_values_the_count_and_the_sum_of_all():
    state = filled([0.1, math.nan, -math.inf, 0.2], max_length=3).state_dict()

    assert state["values"].dtype == torch.float64
    assert torch.equal(state["values"].isnan(), torch.tensor([True, False, False]))
    assert state["values"][1:].tolist() == [-math.inf, 0.2]
    assert state["iterations"].tolist() == [1, 2, 3]
    assert (state["iterations"].dtype, state["count"]) == (torch.int64, 4)
    assert math.isnan(state["sum"])


def test_a_state_does_not_change_when_the_history_goes_on():
    history = filled([1.0, 2.0])
    state = history.state_dict()
    history.update(3.0)

    assert (state["values"].tolist(), state["count"]) == ([1.0, 2.0], 2)


def test_a_shorter_history_takes_the_newest_values_and_the_average_of_all():
    history = HistoryBuffer(max_length=2)
    history.load_state_dict(filled([6.0, 1.0, 2.0, 3.0]).state_dict())

    assert (history.values(), history.global_avg()) == ([(2.0, 2), (3.0, 3)], 3.0)
    history.update(4.0)
    assert history.values() == [(3.0, 3), (4.0, 4)]


def test_an_empty_history_has_a_state_too():
    history = filled([1.0])
    history.load_state_dict(through_a_file(HistoryBuffer().state_dict()))

    assert history.values() == []


def test_a_median_that_is_asked_for_again_is_of_the_newest_values():
    history = HistoryBuffer(5)
    found = []
    for value in (1.0, 5.0, 3.0, math.nan, 7.0, 9.0, 8.0, 10.0):
        history.update(value)
        found.append((history.median(1), history.median(3)))
        assert (history.median(1), history.median(3)) == pytest.approx(found[-1], nan_ok=True)
    assert [one for one, _ in found] == pytest.approx([1, 5, 3, math.nan, 7, 9, 8, 10], nan_ok=True)
    assert [three for _, three in found] == pytest.approx([1, 3, 3, *[math.nan] * 3, 8, 9], nan_ok=True)

    other = HistoryBuffer()
    for value in range(8):
        other.update(value)
    history.load_state_dict(other.state_dict())  # as many values, others
    assert history.median(3) == 6


def test_infinities_of_both_signs_are_no_nan():
    history = HistoryBuffer()
    for value in (math.inf, -math.inf, 1.0):
        history.update(value)
    assert history.median(3) == 1.0


@pytest.mark.parametrize(
    ("iterations", "window", "count"),
    [
        ([0, 1, 2, 3, 4, 5], 3, 3),
        ([0, 1, 2, 3, 4, 5], 6, 6),
        ([0, 1, 2, 3, 4, 5], 100, 6),
        ([0, 1, 2, 2, 2, 5], 3, 1),
        ([0, 1, 2, 3, 3, 3], 2, 4),
        ([1, 3, 3, 4, 4, 5], 3, 5),
        ([0, 20, 40], 20, 1),
        ([4, 4, 4, 5], 1, 1),
    ],
)
def test_a_window_of_iterations_has_so_many_values(iterations, window, count):
    history = HistoryBuffer()
    for iteration in iterations:
        history.update(0.0, iteration)
    assert history.count_within(window) == count
