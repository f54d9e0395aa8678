"""Draws the panels into a PNG file with matplotlib."""

import importlib
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plots.axis import Axis
from plots.labels import Label, best_labels, place_marks
from plots.panels import Panel, iter_axis, run_color
from plots.runs import Run, RunError

_PANEL_SIZE = (4.4, 2.9)  # in inches
_DPI = 110
_LINE_CHARS = 52  # the number of small letters in the width of a panel
_HANDLE_CHARS = 8  # the width of the line sample before a text in a legend, in letters
_INK, _PALE, _GRID = "#30353c", "#6b727c", "#e8eaed"
_DASHES = ["-", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 2, 1, 2))]


def check_matplotlib() -> None:
    """
    Raises:
        RunError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise RunError(
            "a PNG needs the package matplotlib: pip install 'trainkit[plot]'; --html PAGE.html works without it"
        )


def draw_picture(runs: Sequence[Run], panels: Sequence[Panel]) -> Any:
    """A matplotlib ``Figure`` with each of the panels, below a legend of the runs."""
    columns = 1 if len(panels) == 1 else 2 if len(panels) <= 4 else 3
    rows = math.ceil(len(panels) / columns)
    names = [run.name for run in runs]
    texts = [_shorten(name, _LINE_CHARS) for name in names]
    handles = [_line(color=run_color(number), linewidth=3) for number in range(len(runs))]
    if any(curve.is_test for panel in panels for curve in panel.curves):
        handles.append(_line(color=_PALE, linestyle="", marker="D", markersize=6))
        texts.append("test data")
    if any(curve.not_finite for panel in panels for curve in panel.curves):
        handles.append(
            _line(color=_PALE, linestyle="", marker="x", markersize=6, markeredgewidth=2)
        )
        texts.append("not finite from here")
    legend_columns = _num_columns(texts, columns * _LINE_CHARS)
    height = rows * _PANEL_SIZE[1] + 0.25 * math.ceil(len(texts) / legend_columns) + 0.15
    figure = importlib.import_module("matplotlib.figure").Figure(
        (columns * _PANEL_SIZE[0], height), dpi=_DPI, layout="constrained"
    )
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    x_axis = iter_axis(panels)
    for begin in range(0, len(panels), columns):
        row = panels[begin : begin + columns]
        for number, panel in enumerate(row, begin + 1):
            legend_rows = max(_legend_rows(panel, names) for panel in row)
            _draw(figure.add_subplot(rows, columns, number), panel, names, x_axis, legend_rows)
    figure.legend(
        handles,
        texts,
        loc="outside upper left",
        ncols=legend_columns,
        frameon=False,
        labelcolor=_INK,
        fontsize=10,
    )
    return figure


def save_picture(path: Path, runs: Sequence[Run], panels: Sequence[Panel]) -> None:
    """
    Raises:
        RunError: the file cannot be written.
    """
    try:
        draw_picture(runs, panels).savefig(path, format=None if path.suffix else "png")
    except OSError as error:
        raise RunError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    except ValueError as error:  # a suffix that matplotlib does not know
        raise RunError(f"cannot write {str(path)!r}: {error}") from error


def _draw(axes: Any, panel: Panel, names: Sequence[str], x_axis: Axis, legend_rows: int) -> None:
    axes.set_axisbelow(True)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_PALE)
    y_axis = panel.axis
    marks = place_marks(panel, x_axis, y_axis)
    for curve, places in zip(panel.curves, marks, strict=True):
        color = run_color(curve.runs[0])
        for piece in [] if curve.is_test else curve.pieces:
            style = {
                "linestyle": _DASHES[curve.metric],
                "linewidth": 1.6,
                "marker": "o" if len(piece) == 1 else "",
            }
            axes.plot(*zip(*piece, strict=True), **style, color=color, markersize=3.5)
        style = {
            "linestyle": "",
            "marker": "D" if curve.is_test else "o",
            "markersize": 6 if curve.is_test else 4,
        }
        if places:
            axes.plot(
                *zip(*places, strict=True),
                **style,
                color=color,
                mec="white",
                mew=0.7,
                transform=axes.transAxes,
            )
        iters = curve.not_finite
        transform = axes.get_xaxis_transform()  # y counts from the lower edge of the axes
        axes.plot(
            iters, [0.03] * len(iters), "x", transform=transform, color=color, markeredgewidth=2
        )
    for label in best_labels(panel, x_axis, y_axis, marks):
        _add_label(axes, label)
    _scale(axes, x_axis, y_axis)
    above = 5 + 13 * legend_rows
    _add_legend(axes, panel, names, above)
    style = {"pad": above + 5, "color": _INK}
    axes.set_title(
        _shorten(panel.title, 24 if panel.note else 44),
        **style,
        loc="left",
        fontsize=10.5,
        weight="bold",
    )
    axes.set_title(panel.note, **style, loc="right", fontsize=8)


def _scale(axes: Any, x_axis: Axis, y_axis: Axis) -> None:
    axes.set_yscale("log" if y_axis.log else "linear")
    axes.set_xlim(x_axis.low, x_axis.high)
    axes.set_ylim(y_axis.low, y_axis.high)
    axes.set_xticks(*zip(*x_axis.ticks(6), strict=True))
    axes.set_yticks(*zip(*y_axis.ticks(7), strict=True))
    axes.tick_params(which="minor", length=0, labelleft=False)
    axes.tick_params(which="major", length=0, labelsize=8.5, labelcolor=_PALE)
    axes.set_xlabel("iterations", fontsize=8.5, color=_PALE, loc="right", labelpad=1)


def _add_label(axes: Any, label: Label) -> None:
    color = run_color(label.curve.runs[0])
    axes.plot(
        *label.mark, "o", mfc="none", mec=color, mew=1.2, markersize=8, transform=axes.transAxes
    )
    text = axes.text(
        label.left,
        label.bottom + 0.02,
        label.text,
        transform=axes.transAxes,
        color=color,
        fontsize=8.5,
    )
    text.set_path_effects(
        [
            importlib.import_module("matplotlib.patheffects").withStroke(
                linewidth=2.5, foreground="w"
            )
        ]
    )


def _add_legend(axes: Any, panel: Panel, names: Sequence[str], above: float) -> None:
    """Add the legend of line styles and of shared curves; its top is ``above`` points above the curves."""
    shift = importlib.import_module("matplotlib.transforms").ScaledTranslation(
        0, above / 72, axes.figure.dpi_scale_trans
    )
    texts = _legend_texts(panel, names)
    if texts:
        styles = [{"color": _PALE, "linestyle": _DASHES[number]} for number, _ in panel.legend]
        styles += [{"color": run_color(runs[0])} for runs in panel.shared]
        axes.legend(
            [_line(**style, linewidth=1.6) for style in styles],
            texts,
            loc="upper left",
            bbox_to_anchor=(0, 1),
            bbox_transform=axes.transAxes + shift,
            ncols=_num_columns(texts, _LINE_CHARS),
            frameon=False,
            labelcolor=_PALE,
            fontsize=8.5,
            borderaxespad=0,
            borderpad=0.1,
            labelspacing=0.2,
            columnspacing=1.2,
            handlelength=2.2,
        )


def _legend_texts(panel: Panel, names: Sequence[str]) -> list[str]:
    texts = [text for _, text in panel.legend] + [
        ", ".join(names[run] for run in runs) for runs in panel.shared
    ]
    return [_shorten(text, _LINE_CHARS - _HANDLE_CHARS) for text in texts]


def _legend_rows(panel: Panel, names: Sequence[str]) -> int:
    texts = _legend_texts(panel, names)
    return math.ceil(len(texts) / _num_columns(texts, _LINE_CHARS)) if texts else 0


def _num_columns(texts: Sequence[str], chars: int) -> int:
    """The number of legend columns that fit side by side."""
    return min(len(texts), max(1, chars // (_HANDLE_CHARS + max(map(len, texts)))))


def _shorten(text: str, most: int) -> str:
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def _line(**style: Any) -> Any:
    """The line sample before a text in a legend."""
    return importlib.import_module("matplotlib.lines").Line2D([], [], **style)
