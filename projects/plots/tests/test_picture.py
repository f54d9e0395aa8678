"""The picture, by what matplotlib would draw."""

import importlib

import pytest

matplotlib = pytest.importorskip("matplotlib")
picture = importlib.import_module("trainkit.projects.plots.picture")
panels_module = importlib.import_module("trainkit.projects.plots.panels")
runs_module = importlib.import_module("trainkit.projects.plots.runs")


def draw(runs):
    figure = picture.draw_picture(runs, panels_module.choose_panels(runs))
    figure.draw_without_rendering()
    return figure


def boxes(figure):
    """Every text that is seen, with its box in pixels."""
    texts = figure.findobj(importlib.import_module("matplotlib.text").Text)
    seen = {id(text): text for text in texts if text.get_visible() and text.get_text()}
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in axis.get_major_ticks():
            if not low <= tick.get_loc() <= high:  # it is not drawn
                seen.pop(id(tick.label1), None)
    return [[text.get_text(), *text.get_window_extent().extents] for text in seen.values()]


def overlapping(texts, tolerance=1.0):
    """Pairs of texts whose boxes share more than ``tolerance`` pixels both ways."""
    return [
        (a[0], b[0])
        for i, a in enumerate(texts)
        for b in texts[:i]
        if min(a[3], b[3]) - max(a[1], b[1]) > tolerance
        and min(a[4], b[4]) - max(a[2], b[2]) > tolerance
    ]


def test_no_texts_overlap_and_none_leaves_the_picture(three_runs):
    figure = draw(runs_module.read_runs(three_runs))
    texts = boxes(figure)
    width, height = figure.canvas.get_width_height()
    shown = {text[0] for text in texts}
    assert {"training loss", "sem_seg", "10k"} <= shown
    assert overlapping(texts) == []
    outside = [text for text in texts if min(text[1:3]) < 0 or text[3] > width or text[4] > height]
    assert outside == []

    figure.axes[0].set_title("x", loc="left", y=0.5)  # the control
    figure.axes[0].text(0, 0.5, "y", transform=figure.axes[0].transAxes)
    assert overlapping(boxes(figure))


def test_the_names_of_many_runs_have_room(write_run, tmp_path):
    rows = [{"iteration": i, "lr": 0.1, "t/top1": 1.0} for i in range(3)]
    name = "SOLVER.OPTIMIZER.NAME=AdamW," * 5
    for length in (1, 6, 12, 30, 120):
        folders = [tmp_path / str(length) / f"{i:02}_{name[:length]}" for i in range(22)]
        figure = draw(runs_module.read_runs([write_run(folder, rows) for folder in folders]))
        texts = boxes(figure)
        assert overlapping(texts) == []
        assert max(text[3] for text in texts) <= figure.canvas.get_width_height()[0]


def test_a_run_has_the_same_colour_in_all_panels_and_in_the_legend(read):
    runs = read([{"iteration": 9, "lr": 1.0, "x": 2.0}], [{"iteration": 9, "lr": 3.0, "x": 4.0}])
    figure = draw(runs)
    drawn = [
        [line.get_color() for line in axes.get_lines() if len(line.get_xdata())]
        for axes in figure.axes
    ]
    in_legend = [handle.get_color() for handle in figure.legends[0].legend_handles]
    assert len(set(in_legend)) == 2
    assert {*drawn[0]} == {*drawn[1]} == {*in_legend}


def test_a_line_shows_the_values_and_breaks_where_they_are_not_finite(read):
    values = [1.0, 2.0, None, 3.0]
    figure = draw(read([{"iteration": i, "x": value} for i, value in enumerate(values)]))
    line, lonely, crosses = figure.axes[0].get_lines()
    assert line.get_xdata().tolist() == [1, 2, 3, 4]
    assert line.get_ydata().tolist()[:2] == [1.0, 2.0]
    assert str(line.get_ydata()[2]) == "nan"
    assert lonely.get_xdata().tolist() == [4]
    assert lonely.get_ydata().tolist() == [3.0]
    assert crosses.get_xdata().tolist() == [3]
    assert crosses.get_marker() == "x"


def test_runs_with_the_same_values_are_all_seen(read):
    same = [{"iteration": i, "lr": 0.1} for i in range(5)]
    figure = draw(read(same, same, same))
    widths = [
        line.get_linewidth() for line in figure.axes[0].get_lines() if len(line.get_xdata()) == 5
    ]
    assert widths[0] > widths[1] > widths[2]


def test_names_of_any_kind_and_values_of_any_size_are_drawn(write_run, tmp_path):
    names = ["$\\frac{$", "_hidden", "a\ud800\x00b", "%{x}", "<b>", "x" * 200]
    rows = [
        {
            "iteration": i,
            "total_loss": [1e308, -1e308, 1.0][i % 3],
            "t/acc": 1e308,
            **dict.fromkeys(names, i),
        }
        for i in range(9)
    ]
    folders = [write_run(tmp_path / name, rows) for name in ("_a", "$x_", "n" * 200)]
    runs = runs_module.read_runs(folders)
    figure = draw(runs)
    shown = {text[0] for text in boxes(figure)}
    assert {"_a", "$x_", "$\\frac{$", "_hidden", "a\\ud800\\x00b", "%{x}", "<b>"} <= shown
    assert "x" * 47 + "…" in shown
    assert overlapping(boxes(figure)) == []
    picture.save_picture(tmp_path / "x.png", runs, panels_module.choose_panels(runs))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_character_that_the_font_does_not_have_is_a_warning(read, tmp_path, caplog):
    runs = read([{"iteration": 1, "精度": 1.0}])
    picture.save_picture(tmp_path / "x.png", runs, panels_module.choose_panels(runs))
    assert "has boxes for characters" in caplog.text
