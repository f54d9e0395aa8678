"""Which curves stand together, and their axes."""

import numpy as np
import pytest
from trainkit.projects.plots.panels import choose_panels, thin
from trainkit.projects.plots.runs import RunError, Series

FINAL = {
    "classification/top1": 90.0,
    "classification/mean_class_accuracy": 89.0,
    "raw/classification/top1": 80.0,
    "test/classification/top1": 91.0,
    "loss/total_loss": 0.5,
}
TRAINING = {
    "total_loss": 1.0,
    "loss_a": 0.6,
    "lr": 0.1,
    "time": 0.2,
    "data_time": 0.1,
    "grad_norm": 3.0,
}
NOT_DRAWN = {"eta_seconds": 9.0, "rank_data_time": 0.1}


@pytest.fixture
def choose(read):
    return lambda *rows_of_runs: choose_panels(read(*rows_of_runs))


def rows(metrics, iter=9):
    return [{"iteration": iter, **metrics}]


def values_of(key, values):
    return [{"iteration": i, key: value} for i, value in enumerate(values)]


def test_panels_are_chosen_by_what_there_is(choose):
    with pytest.raises(RunError, match="nothing to draw in"):
        choose(rows({"rank_data_time": 1.0}))
    panels = choose(rows({**TRAINING, **NOT_DRAWN, **FINAL}))
    assert [(panel.title, panel.metrics) for panel in panels] == [
        ("training loss", ["total_loss", "loss_a"]),
        ("classification", ["mean_class_accuracy", "top1", "raw top1"]),
        ("evaluation loss", ["total_loss"]),
        ("learning rate", ["lr"]),
        ("grad_norm", ["grad_norm"]),
        ("seconds per step", ["time", "data_time"]),
    ]


def test_a_line_is_told_by_its_run_and_metric_and_the_test_data_by_a_mark(choose):
    first = rows({"t/a": 1.0, "t/b": 2.0})
    second = rows({"t/b": 3.0, "test/t/b": 4.0}, iter=19)
    (panel,) = choose(first, second)
    seen = []
    for line in panel.lines:
        series = line.series
        seen.append((line.run, line.metric, line.is_test, *series.done, *series.values))
    assert seen == [
        (0, 0, False, 10, 1.0),
        (0, 1, False, 10, 2.0),
        (1, 1, False, 20, 3.0),
        (1, 1, True, 20, 4.0),
    ]


def test_the_best_value_of_all_runs_is_known_also_of_a_metric_without_a_task(choose):
    first = [
        {"iteration": i, "total_loss": 1.0, "accuracy": value, "val_loss": 10 - value, "speed": 1.0}
        for i, value in enumerate([3.0, 7.0, 6.0])
    ]
    second = [{"iteration": 0, "total_loss": 1.0, "accuracy": 5.0, "val_loss": 1.5}]
    panels = {panel.title: panel for panel in choose(first, second)}
    assert {*panels} == {"training loss", "evaluation", "speed"}
    assert panels["speed"].bests == [None]
    evaluations = [panel for panel in choose(first, second) if panel.title == "evaluation"]
    assert [panel.legend(["a", "b"]) for panel in evaluations] == [
        ["accuracy   ○ best 7 after 2 (a)"],
        ["val_loss   ○ best 1.5 after 1 (b)"],
    ]


def test_metrics_of_single_classes_are_counted_and_not_drawn_where_there_are_many(choose):
    classes = {f"seg/IoU-{i}": 10.0 + i for i in range(4)}
    (panel,) = choose(rows({**classes, "seg/mIoU": 11.5}))
    assert panel.metrics == ["mIoU"]
    assert panel.notes == ["+ 4 of single classes, not drawn"]
    (panel,) = choose(rows(classes))
    assert panel.metrics == ["IoU-0", "IoU-1", "IoU-2", "IoU-3"]
    assert panel.notes == []


def test_metrics_of_another_size_or_direction_or_too_many_have_a_panel_of_their_own(choose):
    panels = choose(rows({"t/a": 90.0, "t/b": 0.9, "t/c": 10.0, "t/d": 0.5, "t/e": 0.0}))
    assert [panel.metrics for panel in panels] == [["a", "c", "e"], ["b", "d"]]
    panels = choose(rows({"t/acc": 0.9, "t/error": 0.1, "t/recall": 0.8}))
    assert [panel.metrics for panel in panels] == [["acc", "recall"], ["error"]]
    panels = choose(rows({f"loss_{i}": i for i in range(6)}))
    assert [panel.metrics for panel in panels] == [
        ["loss_0", "loss_1", "loss_2", "loss_3"],
        ["loss_4", "loss_5"],
    ]


def test_a_line_has_gaps_where_values_are_not_finite_or_beyond_what_an_axis_can_show(choose):
    values = [None, 1.0, 2.0, None, -1e308, 3.0, 1e308, 4.0, 5.0]
    (panel,) = choose(values_of("x", values))
    (line,) = panel.lines
    assert line.gaps.tolist() == [1, 4, 7]
    assert line.drawn.done[line.lonely].tolist() == [6]
    assert panel.limits(log=False) == pytest.approx((0.8, 5.2))
    assert line.series.values[4] == -1e308


@pytest.mark.parametrize("values", [[0.0], [1e-310, 3e-310], [5e-324], [-1e308, 1e308], [None]])
def test_an_axis_has_two_ends_whatever_the_values_are(choose, values):
    (panel,) = choose(values_of("x", values))
    for log in (False, True):
        low, high = panel.limits(log)
        assert 1e-100 < high - low < 1e101
    assert not panel.is_log


@pytest.mark.parametrize(
    ("key", "values", "is_log"),
    [
        ("total_loss", [2.0, 0.2], True),
        ("total_loss", [2.0, 0.21], False),
        ("total_loss", [2.0, 0.0], False),
        ("loss/total_loss", [4.1, 0.01], True),
        ("val_loss", [4.1, 0.01], True),
        ("t/perplexity", [400.0, 3.0], True),
        ("t/accuracy", [1.0, 99.0], False),
        ("accuracy/cat", [1.0, 99.0], False),
        ("grad_norm", [1e3, 1.0], True),
        ("lr", [1.0, 1e-6], False),
    ],
)
def test_the_axis_is_logarithmic_where_positive_values_span_much(choose, key, values, is_log):
    (panel,) = choose(values_of(key, values))
    assert panel.is_log == is_log


def test_a_line_knows_how_many_later_runs_have_the_same_values(choose):
    same = rows({"t/a": 1.0, "test/t/a": 5.0})
    other = rows({"t/a": 2.0, "test/t/a": 5.0})
    (panel,) = choose(same, other, same)
    assert [(line.run, line.is_test, line.num_above) for line in panel.lines] == [
        (0, False, 1),
        (1, False, 0),
        (2, False, 0),
        (0, True, 2),
        (1, True, 1),
        (2, True, 0),
    ]


def test_the_start_of_a_loss_does_not_fill_its_panel(choose):
    falling = [2.2, 1.4, *(0.6 - 0.001 * i for i in range(98))]
    (panel,) = choose(values_of("total_loss", falling))
    low, high = panel.limits(log=False)
    assert 0.4 < low < 0.5
    assert 0.6 < high < 0.9
    assert panel.notes == ["↑ up to 2.2 at the start"]
    (panel,) = choose(values_of("total_loss", [*falling[:-1], 1.9]))  # a late peak
    assert panel.limits(log=False)[1] > 2.2
    assert panel.notes == []


def test_a_long_line_is_thinned_and_keeps_its_peaks_gaps_and_ends():
    values = np.arange(100_000) % 10.0
    values[54_321] = 1e6
    values[65_432] = -1e6
    values[70_005] = np.nan
    done = np.arange(100_000) + 1
    thinned = thin(Series(done, values))
    assert len(thinned.done) <= 3001
    assert {1, 54_322, 65_433, 70_006, 100_000} <= {*thinned.done.tolist()}
    assert (np.diff(thinned.done) > 0).all()
    np.testing.assert_array_equal(thinned.values, values[thinned.done - 1])
    short = Series(done[:2000], values[:2000])
    assert thin(short) is short


def test_the_middle_of_a_long_line_is_the_mean_of_its_parts(choose):
    values = [float(i % 2) for i in range(4000)]
    values[10:20] = [None] * 10
    (panel,) = choose(values_of("x", values))
    means = panel.lines[0].means
    assert means.done.tolist() == [*range(20, 4001, 20)]
    np.testing.assert_allclose(means.values, 0.5)
    assert panel.notes == [
        "✕ from here not finite, or beyond ±1e100",
        "means of 200 parts; pale: lowest to highest of 1000 parts",
    ]
