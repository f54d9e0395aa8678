"""The page: charts by plotly, and tables, as one HTML file that needs no other."""

import base64
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from plotly.offline import get_plotlyjs
from trainkit.projects.plots.files import Confusion, read_confusions, read_images
from trainkit.projects.plots.panels import SMALLEST, Line, Panel, run_color
from trainkit.projects.plots.results import Row, evaluation_results
from trainkit.projects.plots.runs import Run, RunError, Series, config_difference, readable

Figure: TypeAlias = dict[str, Any]  # of plotly: data and layout

_HERE = Path(__file__).parent
_NONE = "-"
_DASHES = ["solid", "dash", "dot", "dashdot"]  # as the classes of page.css
_PATTERNS = ["solid", "8px,4px", "2px,3px", "10px,3px,2px,3px"]
_PALENESS = 0.25  # of the single values of a long run
_WIDTH, _MORE_WIDTH, _MOST_ABOVE = 1.8, 1.8, 3  # of lines, in pixels
_MOST_ROWS = 20  # of a table of values, for each line
_MOST_NUMBERS = 12  # classes of a matrix whose cells have their numbers in them
_MOST_LABELS = 15  # at an axis
_MOST_LABEL = 16  # letters of a class at an axis
_MOST_NAME = 26  # letters of a name in one line of a table
_MOST_TOGETHER = 16  # lines whose values are shown together
_MOST_TABLE = 30  # classes of a matrix that is also a table


def write_page(path: Path, runs: Sequence[Run], panels: Sequence[Panel]) -> None:
    """
    Raises:
        RunError: the file cannot be written.
    """
    try:
        path.write_text(make_page(runs, panels), encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def make_page(runs: Sequence[Run], panels: Sequence[Panel]) -> str:
    """The HTML of the curves and of the differences between the runs."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    figures: list[Figure] = []
    sections = [
        _boxes(runs),
        _curves(runs, panels, figures),
        _rows_of_runs(runs),
        _rows_of_classes(runs),
        _confusions(runs, figures),
        _pictures(runs),
    ]
    scripts = [get_plotlyjs(), (_HERE / "page.js").read_text(encoding="utf-8")]
    size_mb = len(scripts[0]) / 1e6
    # only these scripts run, whatever a name holds, and nothing is loaded from elsewhere
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; form-action 'none'; base-uri 'none'; img-src data: blob:;"
        f" style-src 'unsafe-inline'; script-src {hashes}"
    )
    # a text in JSON may hold "</script>"
    data = json.dumps(figures, allow_nan=False).replace("<", "\\u003c")
    colors = "".join(
        f".run{number} {{ --run: {run_color(number)}; }}\n" for number in range(len(runs))
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{(_HERE / "page.css").read_text(encoding="utf-8")}{colors}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<noscript><p>The curves need JavaScript. The tables do not.</p></noscript>
{"".join(sections)}<footer>This file has plotly.js inside ({size_mb:.0f} MB), so it needs no network.</footer>
</main>
<script type="application/json" id="figures">{data}</script>
<script>{scripts[0]}</script>
<script>{scripts[1]}</script>
</body>
</html>
"""


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _boxes(runs: Sequence[Run]) -> str:
    labels = [
        f'<label class="run{number}" title="{escape(readable(str(run.folder)))}">'
        f'<input type="checkbox" checked data-run="{number}"><i></i>'
        f"<span>{escape(run.name)}</span></label>\n"
        for number, run in enumerate(runs)
    ]
    return f'<div class="runs">\n{"".join(labels)}</div>\n'


# ---------------------------------------------------------------------------- curves


def _curves(runs: Sequence[Run], panels: Sequence[Panel], figures: list[Figure]) -> str:
    names = [run.name for run in runs]
    last = max(run.num_done for run in runs)
    drawn = []
    for panel in panels:
        legend = []
        for number, text in enumerate(panel.legend(names)):
            legend.append(f'<span><i class="{_DASHES[number]}"></i>{escape(text)}</span>')
        legend += [f"<span>{escape(note)}</span>" for note in panel.notes]
        figures.append(_figure(panel, names, last))
        checked = "checked" if panel.is_log else ""
        disabled = "" if (panel.values >= SMALLEST).any() else "disabled"
        drawn.append(
            f'<section class="panel">\n<h3>{escape(panel.title)}</h3>\n'
            f'<label class="log" title="values up to 0 have no place on a logarithmic axis">'
            f'<input type="checkbox" {checked} {disabled}>log</label>\n'
            f'<div class="legend">{"".join(legend)}</div>\n'
            f'<div class="chart" role="img" aria-label="{escape(panel.title)}"></div>\n'
            f"{_table_of_values(panel, names)}</section>\n"
        )
    about = (
        "<p>Point at a curve to see its values. Drag to zoom, double-click to see all again.</p>\n"
    )
    return f'{about}<div class="panels">\n{"".join(drawn)}</div>\n'


def _figure(panel: Panel, names: Sequence[str], last: int) -> Figure:
    """
    Args:
        last: the largest number of iterations, of all panels.
    """
    traces = [trace for line in panel.lines for trace in _traces(panel, line, names)]
    for best in panel.bests:
        if best is not None:
            ring = {"symbol": "circle-open", "size": 14, "color": run_color(best.run)}
            traces.append(
                _trace(best.run, [best.done], [best.value], marker=ring, cliponaxis=False)
            )
    limits = {}
    for is_log in (False, True):
        low, high = panel.limits(is_log)
        limits["log" if is_log else "linear"] = (
            [math.log10(low), math.log10(high)] if is_log else [low, high]
        )
    layout = {
        "hovermode": "x unified" if len(panel.lines) <= _MOST_TOGETHER else "closest",
        "xaxis": {
            "range": [-0.02 * last, 1.02 * last],
            "unifiedhovertitle": {"text": "after %{x:,d} iterations"},
        },
        "yaxis": {"type": "log" if panel.is_log else "linear"},
    }
    return {"data": traces, "layout": layout, "limits": limits}


def _traces(panel: Panel, line: Line, names: Sequence[str]) -> list[dict[str, Any]]:
    """The line; its single values if it is long; marks where it is not finite."""
    color = run_color(line.run)
    parts = [names[line.run]]
    if len(panel.metrics) > 1:
        parts.append(panel.metrics[line.metric])
    if line.is_test:
        parts.append("test data")
    if line.means is not None:
        parts.append("mean")
    num_above = min(line.num_above, _MOST_ABOVE)
    drawn = line.means or line.drawn
    is_marked = line.lonely | panel.has_marks(line)
    sizes = np.where(is_marked, 5, 0) if line.means is None else np.zeros(1)
    style: dict[str, Any] = {
        "mode": "markers" if line.is_test else "lines+markers" if sizes.any() else "lines",
        "line": {
            "color": color,
            "dash": _PATTERNS[line.metric],
            "width": _WIDTH + _MORE_WIDTH * num_above,
        },
        "marker": {
            "color": color,
            "size": sizes.tolist() if sizes.any() else 0,
            "line": {"width": 0},
            "opacity": 1,
        },
        "hoverinfo": "all",
        "name": escape(" · ".join(parts)),  # plotly reads some HTML
    }
    if line.is_test:
        style["marker"] = {
            "color": color,
            "symbol": "diamond-open",
            "size": 10 + 3 * num_above,
            "line": {"width": 1.5},
        }
        style["cliponaxis"] = False
    traces = []
    if line.means is not None:
        pale = {"color": color, "width": 1}
        traces.append(
            _trace(line.run, *_points(line.drawn), mode="lines", line=pale, opacity=_PALENESS)
        )
    traces.append(_trace(line.run, *_points(drawn), **style))
    if len(line.gaps):
        cross = {"symbol": "x-thin", "size": 8, "line": {"color": color, "width": 2}}
        heights = [0.03] * len(line.gaps)
        traces.append(_trace(line.run, line.gaps.tolist(), heights, marker=cross, yaxis="y2"))
    return traces


def _points(series: Series) -> tuple[list[int], list[float | None]]:
    values = [None if math.isnan(value) else float(f"{value:.6g}") for value in series.values]
    return series.done.tolist(), values


def _trace(run: int, x: Sequence[int], y: Sequence[float | None], **style: Any) -> dict[str, Any]:
    """
    Args:
        run: its number, by which the page hides what belongs to it.
    """
    return {
        "type": "scatter",
        "mode": "markers",
        "hoverinfo": "skip",
        "x": x,
        "y": y,
        "meta": run,
    } | style


def _table_of_values(panel: Panel, names: Sequence[str]) -> str:
    """The values of some iterations, the last one of each line among them."""
    heads = []
    columns = []
    for line in panel.lines:
        parts = [escape(names[line.run])]
        if len(panel.metrics) > 1:
            parts.append(escape(panel.metrics[line.metric]))
        if line.is_test:
            parts.append("test data")
        heads.append(f'<th class="run{line.run}">{"<br>".join(parts)}</th>')
        columns.append(_some_values(line.series))
    rows = []
    for done in sorted({done for column in columns for done in column}):
        cells = [
            f"<td>{_number(column[done]) if done in column else ''}</td>" for column in columns
        ]
        rows.append(f"<tr><th>{done}</th>{''.join(cells)}</tr>\n")
    return _folded_table(f"<th>after iterations</th>{''.join(heads)}", rows)


def _folded_table(head: str, rows: Iterable[str]) -> str:
    """A table that a click shows.

    Args:
        head: HTML of the cells of its first row.
        rows: HTML of the others.
    """
    return (
        f'<details class="values"><summary>values</summary>\n<div class="wide"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{''.join(rows)}</tbody>\n"
        f"</table></div></details>\n"
    )


def _some_values(series: Series) -> dict[int, float | None]:
    """Iterations done -> value: all of a short series, else those next to round numbers, and the last."""
    wanted = np.linspace(0, series.done[-1], _MOST_ROWS)
    places = np.unique(np.searchsorted(series.done, wanted))
    if len(series.done) <= _MOST_ROWS:
        places = np.arange(len(series.done))
    found = {}
    for place in places:
        value = float(series.values[place])
        found[int(series.done[place])] = None if math.isnan(value) else value
    return found


def _number(value: float | None, is_best: bool = False) -> str:
    if value is None:
        return _NONE
    text = f"{value:.6g}"
    return f"<mark>{text}</mark>" if is_best else text


# ---------------------------------------------------------------------------- results

Column: TypeAlias = tuple[
    str, str, list[str]
]  # a text above its title, the title, HTML of its cells


def _rows_of_runs(runs: Sequence[Run]) -> str:
    """A row for each run: the settings that differ, and the results."""
    difference = config_difference([run.config for run in runs]) if len(runs) > 1 else {}
    columns: list[Column] = [("", "iterations", [str(run.num_done) for run in runs])]
    for key, values in difference.items():
        cells = [f"<code>{escape(value)}</code>" if value else _NONE for value in values]
        columns.append(("", key, cells))
    results, _ = evaluation_results(runs)
    for row in results:
        columns += _columns(row)
    notes = []
    title = "Results"
    if len(runs) > 1:
        title = "Settings that differ, and results" if difference else title
        missing = [run.name for run in runs if run.config is None]
        if missing:
            notes.append(f"<p>No config.yaml that can be read: {escape(', '.join(missing))}.</p>\n")
        if not difference and len(missing) < len(runs) - 1:
            notes.append("<p>The configs are the same.</p>\n")
    heads = [run.name for run in runs]
    return f"<h2>{title}</h2>\n{_sheet('run', heads, columns)}{''.join(notes)}"


def _rows_of_classes(runs: Sequence[Run]) -> str:
    """A row for each class, with the results of each run."""
    _, classes = evaluation_results(runs)
    sheets = []
    for task, of_task in itertools.groupby(classes, lambda row: row.task):
        rows = [*of_task]
        columns: list[Column] = []
        for number, run in enumerate(runs):
            of_runs = [_cells(row)[number] for row in rows]
            for place, title in enumerate(_TITLES):
                columns.append((run.name, title, [cells[place] for cells in of_runs]))
        heads = [row.metric for row in rows]
        sheets.append(f"<h3>{escape(task)}</h3>\n{_sheet('class', heads, columns)}")
    if not sheets:
        return ""
    return f"<details><summary>Single classes</summary>\n{''.join(sheets)}</details>\n"


_TITLES = ("last", "best", "test data")


def _cells(row: Row) -> list[tuple[str, str, str]]:
    """The last value, the best value and the test result of each run; the best run is marked."""
    cells = []
    for number, result in enumerate(row.results):
        best = _NONE
        if result.best is not None:
            done, value = result.best
            best = f"{_number(value, number in row.best_runs)} <small>after {done}</small>"
        test = _number(result.test, number in row.best_test_runs)
        cells.append((_number(result.last), best, test))
    return cells


def _columns(row: Row) -> list[Column]:
    over = f"{row.task} · {row.metric}"
    cells = _cells(row)
    return [
        (over, title, [of_run[place] for of_run in cells]) for place, title in enumerate(_TITLES)
    ]


def _sheet(title: str, heads: Sequence[str], columns: Iterable[Column]) -> str:
    """A table that can be sorted; on a narrow screen each row is a card. Columns without a value are left out.

    Args:
        title: of the first column; "run" if the rows have the colours of the runs.
        heads: the start of each row.
    """
    filled = [column for column in columns if any(cell != _NONE for cell in column[2])]
    over = "<th></th>"
    for text, same in itertools.groupby(filled, lambda column: column[0]):
        over += f'<th colspan="{len([*same])}">{escape(text)}</th>'
    titles = [f"<th><button>{title}</button></th>"]
    for _, text, _ in filled:
        titles.append(f"<th><button>{escape(text).replace('.', '.<wbr>')}</button></th>")
    rows = []
    width = min(max(map(len, heads)), _MOST_NAME) + 5
    for number, head in enumerate(heads):
        css_of_row = f"run{number}" if title == "run" else ""
        swatch = "<i></i>" if title == "run" else ""
        cells = [f'<th style="min-width: {width}ch">{swatch}{escape(head)}</th>']
        for above, text, texts in filled:
            name = escape(f"{above} · {text}" if above else text)
            css = "none" if texts[number] == _NONE else ""
            cells.append(f'<td class="{css}" data-name="{name}"><span>{texts[number]}</span></td>')
        rows.append(f'<tr class="{css_of_row}">{"".join(cells)}</tr>\n')
    head = f"<thead><tr>{over}</tr>\n<tr>{''.join(titles)}</tr></thead>\n"
    return f'<div class="wide"><table class="sheet">\n{head}<tbody>\n{"".join(rows)}</tbody>\n</table></div>\n'


# ---------------------------------------------------------------------------- files of the run


def _confusions(runs: Sequence[Run], figures: list[Figure]) -> str:
    parts = []
    for number, run in enumerate(runs):
        for confusion in read_confusions(run):
            name = f"{run.name}: {confusion.title}" if len(runs) > 1 else confusion.title
            figures.append(_figure_of_confusion(confusion))
            parts.append(
                f'<section class="panel" data-of-run="{number}">\n<h3>{escape(name)}</h3>\n'
                f'<div class="chart square" role="img" aria-label="{escape(name)}"></div>\n'
                f"{_table_of_confusion(confusion)}</section>\n"
            )
    if not parts:
        return ""
    about = (
        "<p>A row is the true class, a column the predicted class. "
        "A cell has more colour if it is a larger part of its row.</p>\n"
    )
    return f'<h2>Confusion</h2>\n{about}<div class="panels">\n{"".join(parts)}</div>\n'


def _figure_of_confusion(confusion: Confusion) -> Figure:
    classes = confusion.classes
    shares = []
    texts = []
    for name, row in zip(classes, confusion.matrix, strict=True):
        total = sum(row) or 1
        shares.append([round(number / total, 4) for number in row])
        texts.append(
            [
                escape(f"{name}, predicted {other}: {number:.6g}")
                for other, number in zip(classes, row, strict=True)
            ]
        )
    trace = {
        "type": "heatmap",
        "z": shares,
        "zmin": 0,
        "zmax": 1,
        "showscale": False,
        "hovertext": texts,
        "hoverinfo": "text",
        "xgap": 1,
        "ygap": 1,
    }
    if len(classes) <= _MOST_NUMBERS:
        trace["text"] = [
            [f"{number:.6g}" if number else "" for number in row] for row in confusion.matrix
        ]
        trace["texttemplate"] = "%{text}"
    labels = [
        escape(name if len(name) <= _MOST_LABEL else f"{name[: _MOST_LABEL - 1]}…")
        for name in classes
    ]
    every = -(-len(classes) // _MOST_LABELS)
    axis = {"tickvals": [*range(0, len(classes), every)], "ticktext": labels[::every]}
    layout = {
        "hovermode": "closest",
        "xaxis": {**axis, "side": "top", "title": {"text": ""}},
        "yaxis": {**axis, "autorange": "reversed"},
    }
    return {"data": [trace], "layout": layout}


def _table_of_confusion(confusion: Confusion) -> str:
    if len(confusion.classes) > _MOST_TABLE:
        return f"<p>{len(confusion.classes)} classes are too many for a table.</p>\n"
    names = [escape(name) for name in confusion.classes]
    rows = []
    for name, row in zip(names, confusion.matrix, strict=True):
        cells = "".join(f"<td>{number:.6g}</td>" for number in row)
        rows.append(f"<tr><th>{name}</th>{cells}</tr>\n")
    heads = "".join(f"<th>{name}</th>" for name in names)
    return _folded_table(f"<th></th>{heads}", rows)


def _pictures(runs: Sequence[Run]) -> str:
    parts = []
    for number, run in enumerate(runs):
        images, num_more = read_images(run, len(runs))
        if not images and not num_more:
            continue
        figures = [
            f'<figure><img src="{image.uri}" alt=""><figcaption>{escape(image.caption)}</figcaption></figure>\n'
            for image in images
        ]
        left_out = ""
        if num_more:
            folder = readable(str(run.folder / "visualization"))
            left_out = f"<p>{num_more} more in {escape(folder)}</p>\n"
        parts.append(
            f'<div data-of-run="{number}"><h3>{escape(run.name)}</h3>\n'
            f'<div class="pictures">\n{"".join(figures)}</div>\n{left_out}</div>\n'
        )
    return f"<h2>Pictures</h2>\n{''.join(parts)}" if parts else ""
