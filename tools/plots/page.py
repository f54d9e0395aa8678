"""The page: everything as one HTML file."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from plots.images import read_images
from plots.panels import Panel, class_metrics, iter_axis, run_color
from plots.runs import Run, RunError
from plots.svg import draw_sample, draw_svg
from plots.tables import Result, best_runs, config_difference, evaluation_results

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
    sections = [_runs(runs), _curves(runs, panels), _results(runs), _configs(runs), _pictures(runs)]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{(_HERE / "page.css").read_text()}{_style_of_runs(len(runs))}</style>
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


def _style_of_runs(num_runs: int) -> str:
    """CSS rules for the colour of each run, and to hide a run if its box is not checked."""
    return "".join(
        f".run{number} {{ --run: {run_color(number)}; }}\n"
        f"body:has(#show{number}:not(:checked)) .run{number}:not(label) {{ display: none; }}\n"
        for number in range(num_runs)
    )


def _runs(runs: Sequence[Run]) -> str:
    labels = [
        f'<label class="run{number}" title="{escape(str(run.folder))}">'
        f'<input type="checkbox" id="show{number}" checked><i></i>'
        f"{escape(run.name)} <small>iteration {run.last_iter}</small></label>\n"
        for number, run in enumerate(runs)
    ]
    return f'<div class="runs">\n{"".join(labels)}</div>\n'


def _curves(runs: Sequence[Run], panels: Sequence[Panel]) -> str:
    x_axis, names = iter_axis(panels), [run.name for run in runs]
    drawn = []
    for panel in panels:
        legend = [f"<span>{draw_sample(number)}{escape(text)}</span>" for number, text in panel.legend]
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


def _results(runs: Sequence[Run]) -> str:
    tasks = evaluation_results(runs)
    if not tasks:
        return ""
    classes = {task: class_metrics(metrics) for task, metrics in tasks.items()}
    few = {task: {m: row for m, row in rows.items() if m not in classes[task]} for task, rows in tasks.items()}
    many = {task: {m: row for m, row in rows.items() if m in classes[task]} for task, rows in tasks.items()}
    details = ""
    if any(many.values()):
        details = f"<details><summary>Single classes</summary>\n{_result_table(runs, many)}</details>\n"
    return f"<h2>Evaluation</h2>\n{_result_table(runs, few)}{details}"


def _result_table(runs: Sequence[Run], tasks: dict[str, dict[str, list[Result]]]) -> str:
    names = "".join(f'<th colspan="3" class="run{i}">{escape(run.name)}</th>' for i, run in enumerate(runs))
    columns = "".join(
        f'<th class="run{i} sub">last</th><th class="run{i} sub">best</th><th class="run{i} sub">test data</th>'
        for i in range(len(runs))
    )
    bodies = []
    for task, metrics in tasks.items():
        rows = [f'<tr class="task"><th colspan="{1 + 3 * len(runs)}">{escape(task)}</th></tr>\n'] if metrics else []
        rows += [f"<tr><th>{escape(metric)}</th>{_result_row(metric, row)}</tr>\n" for metric, row in metrics.items()]
        bodies += [f"<tbody>\n{''.join(rows)}</tbody>\n"] if rows else []
    head = f"<thead><tr><th></th>{names}</tr>\n<tr><th></th>{columns}</tr></thead>\n"
    return f'<div class="wide"><table>\n{head}{"".join(bodies)}</table></div>\n'


def _result_row(metric: str, row: Sequence[Result]) -> str:
    best_val = best_runs(metric, [result.best and result.best[1] for result in row])
    best_test = best_runs(metric, [result.test for result in row])
    cells = []
    for number, result in enumerate(row):
        best = _number(result.best and result.best[1], number in best_val)
        at = f" <small>at {result.best[0]}</small>" if result.best else ""
        for text in (_number(result.last), best + at, _number(result.test, number in best_test)):
            cells.append(f'<td class="number run{number}">{text}</td>')
    return "".join(cells)


def _number(value: float | None, is_best: bool = False) -> str:
    text = "-" if value is None else f"{value:.4g}" if abs(value) < 100 else f"{value:.6g}"
    return f"<mark>{text}</mark>" if is_best else text


def _configs(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return ""
    missing = [run.name for run in runs if run.config is None]
    notes = [f"<p>No config.yaml that can be read: {escape(', '.join(missing))}.</p>\n"] if missing else []
    difference = config_difference(runs)
    if difference:
        names = "".join(f'<th class="run{i}">{escape(run.name)}</th>' for i, run in enumerate(runs))
        rows = "".join(f"<tr><th>{escape(key)}</th>{_cells(row)}</tr>\n" for key, row in difference.items())
        notes.append(
            f'<div class="wide config"><table>\n<thead><tr><th></th>{names}</tr></thead>\n{rows}</table></div>\n'
        )
    elif len(missing) < len(runs) - 1:
        notes.append("<p>The configs are the same.</p>\n")
    return f"<h2>Settings that differ</h2>\n{''.join(notes)}"


def _cells(values: Iterable[str]) -> str:
    return "".join(
        f'<td class="run{number}">{f"<code>{escape(value)}</code>" if value else "-"}</td>'
        for number, value in enumerate(values)
    )


def _pictures(runs: Sequence[Run]) -> str:
    parts = []
    for number, run in enumerate(runs):
        images, num_more = read_images(run, len(runs))
        if not images and not num_more:
            continue
        left_out = f"<p>{num_more} more in {escape(str(run.folder / 'visualization'))}</p>\n" if num_more else ""
        figures = "".join(
            f'<figure><img src="{image.uri}" alt=""><figcaption>{escape(image.caption)}</figcaption></figure>\n'
            for image in images
        )
        parts.append(
            f'<div class="run{number}"><h3>{escape(run.name)}</h3>\n'
            f'<div class="pictures">\n{figures}</div>\n{left_out}</div>\n'
        )
    return f"<h2>Pictures</h2>\n{''.join(parts)}" if parts else ""
