"""The picture, by what matplotlib would draw."""

import importlib
import importlib.util

import pytest

from tests.tools.plots.browser import overlapping

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def draw(load):
    def draw(runs):
        figure = load("plots.picture").draw_picture(runs, load("plots.panels").choose_panels(runs))
        figure.draw_without_rendering()
        return figure

    return draw


def boxes(figure):
    """Every text that is seen, with its box in pixels."""
    texts = figure.findobj(importlib.import_module("matplotlib.text").Text)
    seen = {id(text): text for text in texts if text.get_visible() and text.get_text()}
    return [[text.get_text(), *text.get_window_extent().extents] for text in seen.values()]


@pytest.fixture(scope="module")
def figure(draw, load, three_runs):
    return draw(load("plots.runs").read_runs(three_runs))


def test_no_texts_overlap_and_none_leaves_the_picture(figure):
    texts = boxes(figure)
    width, height = figure.canvas.get_width_height()
    assert {"training loss", "sem_seg", "mean_class_accuracy = top1", "10k"} <= {
        text[0] for text in texts
    }
    assert overlapping(texts) == []
    assert [
        text for text in texts if min(text[1:3]) < 0 or text[3] > width or text[4] > height
    ] == []


def test_a_run_has_the_same_colour_in_all_panels_and_in_the_legend(draw, read):
    figure = draw(
        read([{"iteration": 9, "lr": 1.0, "x": 2.0}], [{"iteration": 9, "lr": 3.0, "x": 4.0}])
    )
    drawn = [
        [line.get_color() for line in axes.get_lines() if len(line.get_xdata())]
        for axes in figure.axes
    ]
    assert (
        [handle.get_color() for handle in figure.legends[0].legend_handles] == drawn[0] == drawn[1]
    )
    assert len(set(drawn[0])) == 2


def test_a_line_shows_the_values_and_breaks_where_they_are_not_finite(draw, read):
    values = [1.0, 2.0, None, 3.0]
    figure = draw(read([{"iteration": i, "x": value} for i, value in enumerate(values)]))
    lines = [
        ([*map(float, line.get_xdata())], [*map(float, line.get_ydata())])
        for line in figure.axes[0].get_lines()
    ]
    # the last one: where it is marked
    assert lines == [
        ([1, 2], [1, 2]),
        ([4], [3]),
        ([3], [0.03]),
    ]
    assert [text.get_text() for text in figure.legends[0].texts] == ["a", "not finite from here"]
