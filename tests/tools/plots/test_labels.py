"""Places of marks and texts among the curves."""

import itertools

import pytest


@pytest.fixture
def place(load, read):
    """The panel of ``t`` in these runs, the places of the marks of its curves, and its labels."""

    def place(*rows_of_runs):
        panels, labels = load("plots.panels"), load("plots.labels")
        chosen = panels.choose_panels(read(*rows_of_runs))
        panel = next(panel for panel in chosen if panel.title == "t")
        axes = panels.iter_axis(chosen), panel.axis
        marks = labels.place_marks(panel, *axes)
        return panel, marks, labels.best_labels(panel, *axes, marks)

    return place


def evaluated(values, test=None, metric="top1"):
    rows = [
        {"iteration": 10 * i - 1, "lr": 0.1, f"t/{metric}": value}
        for i, value in enumerate(values, 1)
    ]
    return rows + (
        [] if test is None else [{"iteration": 10 * len(values), f"test/t/{metric}": test}]
    )


def test_no_mark_of_a_test_result_hides_another(place):
    runs = [evaluated([50.0, 90.0 + i / 100], test=90.0 + i / 1000) for i in range(8)]
    panel, marks, _ = place(*runs)
    tests = [places[0] for curve, places in zip(panel.curves, marks, strict=True) if curve.is_test]
    assert len(tests) == 8
    for one, other in itertools.combinations(tests, 2):
        assert abs(one[0] - other[0]) >= 0.017 or abs(one[1] - other[1]) >= 0.03
    assert all(0 < x < 1 for x, _ in tests)


def test_texts_of_several_metrics_do_not_overlap_and_a_metric_without_a_known_mode_has_none(place):
    rows = [
        {
            "iteration": i,
            "t/top1": 90.0 + i % 3,
            "t/acc": 90.5 + i % 3,
            "t/map": 89.9 + i % 3,
            "t/speed": 70.0 + i,
        }
        for i in range(20)
    ]
    _, _, labels = place(rows)
    assert [label.text.split()[1] for label in labels] == ["92.5", "91.9", "92"]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(labels, 2))
