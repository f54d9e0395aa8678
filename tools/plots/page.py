"""The page: everything as one HTML file."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from plots.confusion import draw_confusion, read_confusions
from plots.images import read_images
from plots.panels import Panel, better, iter_axis, run_color
from plots.runs import Run, RunError
from plots.sheet import NONE, Column, draw_sheet
from plots.svg import class_of, draw_sample, draw_svg
from plots.tables import Result, Results, best_runs, config_difference, evaluation_results

_HERE = Path(__file__).parent

# the browser refuses to load anything from elsewhere
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_page(path: Path, runs: Sequence[Run], panels: Sequence[Panel]) -> None:
    """
    Raises:
        RunError: the file cannot be written.
    """
    try:
        path.write_text(make_page(runs, panels), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise RunError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def make_page(runs: Sequence[Run], panels: Sequence[Panel]) -> str:
    """The HTML of the curves and of the differences between the runs; it needs no other file."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    results, of_classes = evaluation_results(runs)
    sections = [
        _boxes(runs),
        _curves(runs, panels),
        _rows(runs, results),
        _classes(runs, of_classes),
    ]
    sections += [_confusions(runs), _pictures(runs)]
    shared = {curve.runs for panel in panels for curve in panel.curves}
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{(_HERE / "page.css").read_text()}{_style_of_runs(len(runs), shared)}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{"".join(sections)}</main>
<script>
{(_HERE / "page.js").read_text()}</script>
</body>
</html>
"""


def _style_of_runs(num_runs: int, shared: Iterable[tuple[int, ...]]) -> str:
    """CSS rules for the colour of what belongs to one or several runs.

    An element has the colour of the first of its runs whose box is checked; it is hidden if no box is checked.
    """
    rules = []
    for runs in sorted({*shared, *((number,) for number in range(num_runs))}):
        hidden = ""
        for number in runs:
            rules.append(f"{hidden} .{class_of(runs)} {{ --run: {run_color(number)}; }}\n")
            hidden = (hidden or "body") + f":has(#show{number}:not(:checked))"
        rules.append(f"{hidden} .{class_of(runs)}:not(label) {{ display: none; }}\n")
    return "".join(rules)


def _boxes(runs: Sequence[Run]) -> str:
    labels = [
        f'<label class="run{number}" title="{escape(str(run.folder))}">'
        f'<input type="checkbox" id="show{number}" checked>{_name(run)}</label>\n'
        for number, run in enumerate(runs)
    ]
    return f'<div class="runs">\n{"".join(labels)}</div>\n'


def _name(run: Run) -> str:
    return f"<i></i><span>{escape(run.name)}</span>"


def _curves(runs: Sequence[Run], panels: Sequence[Panel]) -> str:
    x_axis, names = iter_axis(panels), [run.name for run in runs]
    drawn = []
    for panel in panels:
        legend = [
            f"<span>{draw_sample(number)}{escape(text)}</span>" for number, text in panel.legend
        ]
        for shared in panel.shared:
            text = ", ".join(names[number] for number in shared)
            legend.append(
                f'<span class="{class_of(shared)}">{draw_sample(0, shared)}{escape(text)}</span>'
            )
        legend += [f"<span>{panel.note}</span>"] if panel.note else []
        if any(curve.is_test for curve in panel.curves):
            legend.append("<span>◆ test data</span>")
        if any(curve.not_finite for curve in panel.curves):
            legend.append("<span>✕ not finite from here</span>")
        drawn.append(
            f'<section class="panel">\n<h3>{escape(panel.title)}</h3>\n<div class="legend">{"".join(legend)}</div>\n'
            f"{draw_svg(panel, names, x_axis)}\n</section>\n"
        )
    return f'<div class="panels">\n{"".join(drawn)}</div>\n'


def _rows(runs: Sequence[Run], results: Results) -> str:
    """A row for each run: the settings that differ, and the results."""
    difference = config_difference(runs) if len(runs) > 1 else {}
    groups = [[Column("", "iterations", [str(run.num_done) for run in runs], "number")]]
    for key, values in difference.items():
        cells = [f"<code>{escape(value)}</code>" if value else NONE for value in values]
        groups.append([Column("", escape(key).replace(".", ".<wbr>"), cells)])
    for task, metrics in results.items():
        groups += [
            _columns(f"{task} · {metric}", _cells(metric, row), metric)
            for metric, row in metrics.items()
        ]
    title, notes = "Results", []
    if len(runs) > 1:
        title = "Settings that differ, and results" if difference else title
        missing = [run.name for run in runs if run.config is None]
        notes = (
            [f"<p>No config.yaml that can be read: {escape(', '.join(missing))}.</p>\n"]
            if missing
            else []
        )
        if not difference and len(missing) < len(runs) - 1:
            notes.append("<p>The configs are the same.</p>\n")
    classes = [class_of([number]) for number in range(len(runs))]
    return (
        f"<h2>{title}</h2>\n{draw_sheet('run', map(_name, runs), classes, groups)}{''.join(notes)}"
    )


def _classes(runs: Sequence[Run], results: Results) -> str:
    """A row for each class, with the results of each run."""
    sheets = []
    for task, metrics in results.items():
        rows = [_cells(metric, row) for metric, row in metrics.items()]
        groups = [
            _columns(run.name, [row[number] for row in rows], css=class_of([number]))
            for number, run in enumerate(runs)
        ]
        sheets.append(
            f"<h3>{escape(task)}</h3>\n{draw_sheet('class', map(escape, metrics), [''] * len(rows), groups)}"
        )
    return (
        f"<details><summary>Single classes</summary>\n{''.join(sheets)}</details>\n"
        if sheets
        else ""
    )


def _cells(metric: str, row: Sequence[Result]) -> list[tuple[str, str, str]]:
    """The texts of the last value, the best value and the test result of each run; the best run is marked."""
    best_val = best_runs(metric, [result.best and result.best[1] for result in row])
    best_test = best_runs(metric, [result.test for result in row])
    cells = []
    for number, result in enumerate(row):
        best = _number(result.best and result.best[1], number in best_val)
        after = f" <small>after {result.best[0]}</small>" if result.best else ""
        cells.append(
            (_number(result.last), best + after, _number(result.test, number in best_test))
        )
    return cells


def _columns(
    over: str, cells: Sequence[tuple[str, str, str]], metric: str = "", css: str = ""
) -> list[Column]:
    titles = ("last", "best", "test data")
    columns = zip(titles, zip(*cells, strict=True), strict=True)
    return [
        Column(over, title, [*texts], f"number {css}", better(metric) is max)
        for title, texts in columns
    ]


def _number(value: float | None, is_best: bool = False) -> str:
    text = NONE if value is None else f"{value:.4g}" if abs(value) < 100 else f"{value:.6g}"
    return f"<mark>{text}</mark>" if is_best else text


def _confusions(runs: Sequence[Run]) -> str:
    parts = []
    for number, run in enumerate(runs):
        for confusion in read_confusions(run):
            name = f"{run.name}: {confusion.title}" if len(runs) > 1 else confusion.title
            head = f'<section class="panel {class_of([number])}"><h3>{escape(name)}</h3>\n'
            parts.append(f"{head}{draw_confusion(confusion)}</section>\n")
    about = "<p>A row is the true class, a column the predicted class.</p>\n"
    return (
        f'<h2>Confusion</h2>\n{about}<div class="panels">\n{"".join(parts)}</div>\n'
        if parts
        else ""
    )


def _pictures(runs: Sequence[Run]) -> str:
    parts = []
    for number, run in enumerate(runs):
        images, num_more = read_images(run, len(runs))
        if not images and not num_more:
            continue
        left_out = (
            f"<p>{num_more} more in {escape(str(run.folder / 'visualization'))}</p>\n"
            if num_more
            else ""
        )
        figures = "".join(
            f'<figure><img src="{image.uri}" alt=""><figcaption>{escape(image.caption)}</figcaption></figure>\n'
            for image in images
        )
        parts.append(
            f'<div class="run{number}"><h3>{escape(run.name)}</h3>\n'
            f'<div class="pictures">\n{figures}</div>\n{left_out}</div>\n'
        )
    return f"<h2>Pictures</h2>\n{''.join(parts)}" if parts else ""
