"""Which curves stand together, and their axes."""

import pytest

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
def choose(load, read):
    return lambda *rows_of_runs: load("plots.panels").choose_panels(read(*rows_of_runs))


def rows(metrics, iter=9):
    return [{"iteration": iter, **metrics}]


def test_panels_are_chosen_by_what_there_is(choose, load):
    with pytest.raises(load("plots.runs").RunError, match="nothing to draw in"):
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
    classification = choose(
        rows({"t/a": 1.0, "t/b": 2.0}), rows({"t/b": 3.0, "test/t/b": 4.0}, iter=19)
    )[0]
    assert [
        (curve.runs, curve.metric, curve.is_test, curve.points) for curve in classification.curves
    ] == [
        ((0,), 0, False, [(10, 1.0)]),
        ((0,), 1, False, [(10, 2.0)]),
        ((1,), 1, False, [(20, 3.0)]),
        ((1,), 1, True, [(20, 4.0)]),
    ]


def test_metrics_of_single_classes_are_counted_and_not_drawn_where_there_are_many(choose):
    classes = {f"seg/IoU-{i}": 10.0 + i for i in range(4)}
    (panel,) = choose(rows({**classes, "seg/mIoU": 11.5}))
    assert (panel.metrics, panel.note) == (["mIoU"], "+ 4 of single classes, not drawn")
    (panel,) = choose(rows(classes))
    assert (panel.metrics, panel.note) == (["IoU-0", "IoU-1", "IoU-2", "IoU-3"], "")


def test_metrics_of_another_size_or_too_many_have_a_panel_of_their_own(choose):
    panels = choose(rows({"t/a": 90.0, "t/b": 0.9, "t/c": 10.0, "t/d": 0.5, "t/e": 0.0}))
    assert [panel.metrics for panel in panels] == [["a", "c", "e"], ["b", "d"]]
    panels = choose(rows({f"loss_{i}": i for i in range(6)}))
    assert [panel.metrics for panel in panels] == [
        ["loss_0", "loss_1", "loss_2", "loss_3"],
        ["loss_4", "loss_5"],
    ]


def test_a_line_breaks_where_values_are_not_finite_and_that_is_marked_once(choose):
    values = [None, 1.0, 2.0, None, None, 3.0, None]
    (curve,) = choose([{"iteration": i, "x": value} for i, value in enumerate(values)])[0].curves
    assert curve.pieces == [[(2, 1.0), (3, 2.0)], [(6, 3.0)]]
    assert curve.not_finite == [1, 4, 7]


def test_the_axis_is_logarithmic_where_positive_values_span_much(choose):
    cases = [
        ("total_loss", [2.0, 0.2], True),
        ("total_loss", [2.0, 0.21], False),
        ("total_loss", [2.0, 0.0], False),
    ]
    cases += [
        ("grad_norm", [1e3, 1.0], True),
        ("lr", [1.0, 1e-6], False),
        ("t/a", [1.0, 1e-6], False),
    ]
    for key, values, log in cases:
        (panel,) = choose([{"iteration": i, key: value} for i, value in enumerate(values)])
        assert panel.axis.log == log, key


def test_runs_with_the_same_values_are_one_curve_but_each_result_on_the_test_data_is_drawn(choose):
    same, other = rows({"t/a": 1.0, "test/t/a": 5.0}), rows({"t/a": 2.0, "test/t/a": 5.0})
    (panel,) = choose(same, other, same)
    assert [curve.runs for curve in panel.curves] == [(0, 2), (1,), (0,), (1,), (2,)]
    assert panel.shared == [(0, 2)]


def falling(values):
    return [{"iteration": i, "total_loss": value} for i, value in enumerate(values)]


def test_the_start_of_a_loss_does_not_fill_its_panel(choose):
    (panel,) = choose(falling([2.2, 1.4, *(0.6 - 0.001 * i for i in range(98))]))
    assert (panel.axis.log, panel.note) == (False, "↑ up to 2.2 at the start")
    assert 0.4 < panel.axis.low < 0.6 < panel.axis.high < 0.9
    late_peak = [2.2, 1.4, *(0.6 - 0.001 * i for i in range(97)), 1.9]
    (panel,) = choose(falling(late_peak))
    assert (panel.axis.high > 2.2, panel.note) == (True, "")


def test_ticks_are_round_and_have_the_digits_that_they_need(load):
    for low, high, log, texts in (
        (-20, 12_240, False, "0 5000 10k"),
        (0, 2.2e6, False, "0 500k 1M 1.5M 2M"),
        (99.2, 99.61, False, "99.2 99.3 99.4 99.5 99.6"),
        (0, 5e-5, False, "0 1e-05 2e-05 3e-05 4e-05 5e-05"),
        (0.009, 2.4, True, "0.01 0.03 0.1 0.3 1"),
    ):
        assert [
            text for _, text in load("plots.axis").Axis(low, high, log).ticks(6)
        ] == texts.split()
