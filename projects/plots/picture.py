"""Draws the panels with matplotlib."""

import logging
import math
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator
from trainkit.projects.plots.panels import Line, Panel, run_color
from trainkit.projects.plots.runs import Run, RunError, Series

logger = logging.getLogger(__name__)

_PANEL_SIZE = (4.8, 2.9)  # in inches
_DPI = 110
_NUM_CHARS = 48  # the number of letters of a run's name in the width of a panel
_HANDLE_CHARS = 10  # the width of the line sample before it and of the space after it, in letters
_LEGEND_CHARS = 56  # the number of smaller letters in the width of the curves
_MOST_TITLE = 48  # letters
_LEGEND_LINE = 12.5  # the height of a line of a legend, in points
_INK, _PALE, _GRID = "#30353c", "#6b727c", "#e8eaed"
_DASHES: list[Any] = ["-", (0, (8, 3)), (0, (2, 2.5)), (0, (10, 3, 2, 3))]  # in points
_PALENESS = 0.2  # of the single values of a long run
_WIDTH, _MORE_WIDTH, _MOST_ABOVE = 1.6, 1.4, 3  # of lines, in points


def save_picture(path: Path, runs: Sequence[Run], panels: Sequence[Panel]) -> None:
    """
    Raises:
        RunError: the file cannot be written.
    """
    try:
        figure = draw_picture(runs, panels)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            figure.savefig(path, format=None if path.suffix else "png")
    except OSError as error:
        raise RunError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    except ValueError as error:  # a suffix that matplotlib does not know
        raise RunError(f"cannot write {str(path)!r}: {error}") from error
    if any("Glyph" in str(warning.message) for warning in caught):
        logger.warning("%s has boxes for characters that its font does not have", path)


def draw_picture(runs: Sequence[Run], panels: Sequence[Panel]) -> Figure:
    """The panels, below a legend of the runs."""
    columns = 1 if len(panels) == 1 else 2 if len(panels) <= 4 else 3
    rows = math.ceil(len(panels) / columns)
    names = [run.name for run in runs]
    num_chars = columns * _NUM_CHARS
    texts = [_wrap(name, num_chars - _HANDLE_CHARS) for name in names]
    longest = max(len(line) for text in texts for line in text.splitlines())
    legend_columns = min(len(runs), max(1, num_chars // (longest + _HANDLE_CHARS)))
    legend_rows = math.ceil(len(runs) / legend_columns) * max(map(_num_lines, texts))
    legends = [_legend_texts(panel, names) for panel in panels]
    height = rows * _PANEL_SIZE[1] + 0.25 * legend_rows + 0.15
    # a name with "$" is no formula; a wide line has the same dashes as a thin one
    with matplotlib.rc_context({"text.parse_math": False, "lines.scale_dashes": False}):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
        figure = Figure((columns * _PANEL_SIZE[0], height), dpi=_DPI, layout=layout)
        last = max(int(line.series.done[-1]) for panel in panels for line in panel.lines)
        for number, panel in enumerate(panels):
            first_in_row = number - number % columns
            in_row = legends[first_in_row : first_in_row + columns]
            num_lines = max(sum(map(_num_lines, of_panel)) for of_panel in in_row)
            axes = figure.add_subplot(rows, columns, number + 1)
            _draw_lines(axes, panel)
            _set_scales(axes, panel, last)
            num_handles = len(panel.legend(names))
            _add_legend(axes, panel.title, legends[number], num_handles, num_lines)
        figure.legend(
            [Line2D([], [], color=run_color(run), linewidth=3) for run in range(len(runs))],
            texts,
            loc="outside upper left",
            ncols=legend_columns,
            frameon=False,
            labelcolor=_INK,
            fontsize=10,
        )
    return figure


def _draw_lines(axes: Any, panel: Panel) -> None:
    for line in panel.lines:
        series = line.drawn
        style = _style(panel, line)
        if line.means is not None:
            axes.plot(series.done, series.values, color=run_color(line.run), alpha=_PALENESS)
            series = line.means
        axes.plot(series.done, series.values, **style, color=run_color(line.run))
        if not line.is_test:
            lonely = Series(line.drawn.done[line.lonely], line.drawn.values[line.lonely])
            axes.plot(lonely.done, lonely.values, "o", color=run_color(line.run), markersize=3.5)
        # y counts from the lower edge of the axes
        axes.plot(
            line.gaps,
            np.full(len(line.gaps), 0.03),
            "x",
            color=run_color(line.run),
            markeredgewidth=2,
            transform=axes.get_xaxis_transform(),
        )
    for best in panel.bests:
        if best is not None:
            axes.plot(
                best.done,
                best.value,
                "o",
                markerfacecolor="none",
                color=run_color(best.run),
                markersize=10,
                clip_on=False,
            )


def _style(panel: Panel, line: Line) -> dict[str, Any]:
    num_above = min(line.num_above, _MOST_ABOVE)
    if line.is_test:
        return {
            "linestyle": "",
            "marker": "D",
            "markerfacecolor": "none",
            "markeredgewidth": 1.5,
            "markersize": 6 + 2 * num_above,
            "clip_on": False,
        }
    return {
        "linestyle": _DASHES[line.metric],
        "linewidth": _WIDTH + _MORE_WIDTH * num_above,
        "marker": "o" if panel.has_marks(line) else "",
        "markersize": 3.5,
    }


def _set_scales(axes: Any, panel: Panel, last: int) -> None:
    """
    Args:
        last: the largest number of iterations, of all panels.
    """
    axes.set_axisbelow(True)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_PALE)
    axes.set_xlim(-0.02 * last, 1.02 * last)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_yscale("log" if panel.is_log else "linear")
    low, high = panel.limits(panel.is_log)
    axes.set_ylim(low, high)
    if panel.is_log:
        num_decades = math.log10(high / low)
        factors = (1, 2, 5) if num_decades < 2 else (1, 3) if num_decades < 4 else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=factors, numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.ticklabel_format(axis="y", useOffset=False, useMathText=False)
    axes.tick_params(which="both", length=0, labelsize=8.5, labelcolor=_PALE)
    axes.set_xlabel("iterations", fontsize=8.5, color=_PALE, loc="right", labelpad=1)


def _legend_texts(panel: Panel, names: Sequence[str]) -> list[str]:
    """The texts between title and curves: a line of the legend each, then notes."""
    legend = [_wrap(text, _LEGEND_CHARS) for text in panel.legend(names)]
    notes = [_wrap(text, _LEGEND_CHARS) for text in panel.notes]
    return legend + notes


def _add_legend(
    axes: Any, title: str, texts: Sequence[str], num_handles: int, num_lines: int
) -> None:
    """Add title and legend above the curves.

    Args:
        num_handles: this many texts have a sample of their line.
        num_lines: the height of the legend; panels beside each other have the same.
    """
    style = {"color": _INK, "fontsize": 10.5, "weight": "bold", "loc": "left"}
    if len(title) > _MOST_TITLE:
        title = title[: _MOST_TITLE - 1] + "…"
    axes.set_title(title, pad=6 + _LEGEND_LINE * num_lines, **style)
    if not texts:
        return
    num_missing = num_lines - sum(map(_num_lines, texts))
    texts = [*texts, *[""] * num_missing]
    handles = []
    for number in range(len(texts)):
        dash = _DASHES[number] if number < num_handles else ""
        handles.append(Line2D([], [], color=_PALE, linestyle=dash, linewidth=1.6))
    axes.legend(
        handles,
        texts,
        loc="lower left",
        bbox_to_anchor=(0, 1.02),
        frameon=False,
        labelcolor=_PALE,
        fontsize=8.5,
        borderaxespad=0,
        borderpad=0.1,
        labelspacing=0.2,
        handlelength=2.2,
    )


def _wrap(text: str, num_chars: int) -> str:
    return textwrap.fill(text, num_chars) or text


def _num_lines(text: str) -> int:
    return text.count("\n") + 1
