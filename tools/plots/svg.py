"""Draws a panel as SVG for the page; its colours are in page.css."""

from collections.abc import Iterator, Sequence
from html import escape

from plots.axis import Axis
from plots.labels import Label, Place, best_labels, place_marks
from plots.panels import Curve, Panel

WIDTH, HEIGHT = 400, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 8, 8, 34
_MOST_POINTS = 500  # points of a line; more would be closer than a pixel


def draw_svg(panel: Panel, names: list[str], x_axis: Axis) -> str:
    """The curves, each with its values for page.js.

    Args:
        names: the names of the runs.
    """
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(panel.title)}">']
    y_axis = panel.axis
    for value, text in y_axis.ticks(7):
        y = _y(y_axis.place(value))
        parts.append(f'<path class="grid" d="M{_LEFT} {y}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y}" dy="0.35em" text-anchor="end">{text}</text>')
    for value, text in x_axis.ticks(5):
        x = _x(x_axis.place(value))
        parts.append(f'<path class="grid" d="M{x} {_TOP}V{HEIGHT - _BOTTOM}"/>')
        parts.append(
            f'<text x="{x}" y="{HEIGHT - _BOTTOM + 14}" text-anchor="middle">{text}</text>'
        )
    parts.append(f'<path class="base" d="M{_LEFT} {HEIGHT - _BOTTOM}H{WIDTH - _RIGHT}"/>')
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}" text-anchor="end">iterations</text>')
    # an inner picture with the same coordinates, which cuts off what leaves the axes
    width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _BOTTOM - _TOP
    box = f'viewBox="{_LEFT} {_TOP} {width} {height}"'
    parts.append(f'<svg x="{_LEFT}" y="{_TOP}" width="{width}" height="{height}" {box}>')
    marks = place_marks(panel, x_axis, y_axis)
    parts += [
        _draw(*drawn, panel, names, x_axis, y_axis)
        for drawn in zip(panel.curves, marks, strict=True)
    ]
    parts += map(_draw_label, best_labels(panel, x_axis, y_axis, marks))
    return "\n".join([*parts, "</svg>", "</svg>"])


def draw_sample(metric: int, runs: Sequence[int] = ()) -> str:
    """A sample of a metric's line style, or of the colour of runs, for a legend."""
    color = f"curve {class_of(runs)}" if runs else ""
    return f'<svg class="sample {color}" viewBox="0 0 26 8"><path class="line dash{metric}" d="M1 4H25"/></svg>'


def class_of(runs: Sequence[int]) -> str:
    """The CSS class of what belongs to these runs."""
    return f"run{'-'.join(map(str, runs))}"


def _draw(
    curve: Curve, marks: Sequence[Place], panel: Panel, names: list[str], x_axis: Axis, y_axis: Axis
) -> str:
    pieces = [thin(piece) for piece in curve.pieces]
    points = [point for piece in pieces for point in piece]
    if curve.is_test:  # each result is a mark
        places = [[_pixels(mark)] for mark in marks]
    else:
        places = [
            [_pixels((x_axis.place(done), y_axis.place(value))) for done, value in piece]
            for piece in pieces
        ]
    of_runs = ", ".join(names[run] for run in curve.runs)
    label = " · ".join(
        [of_runs, panel.metrics[curve.metric], *(["test data"] if curve.is_test else [])]
    )
    data = f'data-label="{escape(label)}" data-iters="{" ".join(str(done) for done, _ in points)}" '
    data += f'data-values="{" ".join(f"{value:.6g}" for _, value in points)}"'
    # close a piece of one point: its round ends are then drawn
    line = "".join("M" + "L".join(piece) + ("Z" if len(piece) == 1 else "") for piece in places)
    shapes = [f'<path class="line dash{curve.metric}" d="{line}"/>']
    shape = "M-5 0L0-5L5 0L0 5Z" if curve.is_test else "M-3 0A3 3 0 1 1 3 0A3 3 0 1 1-3 0Z"
    shapes += [
        f'<path class="mark" transform="translate({_pixels(mark)})" d="{shape}"/>' for mark in marks
    ]
    for done in curve.not_finite:
        shapes.append(
            f'<path class="cross" d="M{_x(x_axis.place(done)) - 4} {_y(0) - 10}l8 8m-8 0l8-8"/>'
        )
    return f'<g class="curve {class_of(curve.runs)}" {data}>{"".join(shapes)}</g>'


def _draw_label(label: Label) -> str:
    ring = f'<circle cx="{_x(label.mark[0])}" cy="{_y(label.mark[1])}" r="5.5"/>'
    text = f'<text x="{_x(label.left)}" y="{_y(label.bottom) - 4}">{label.text}</text>'
    return f'<g class="best {class_of(label.curve.runs)}">{ring}{text}</g>'


def thin(points: list[tuple[int, float]], most: int = _MOST_POINTS) -> list[tuple[int, float]]:
    """Fewer points: of neighbours only the lowest and the highest, plus the first and the last. So no peak is lost."""
    if len(points) <= most:
        return points
    size = -(-2 * len(points) // (most - 2))
    return [points[0], *_extremes(points[1:-1], size), points[-1]]


def _extremes(points: list[tuple[int, float]], size: int) -> Iterator[tuple[int, float]]:
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        yield from sorted(
            {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        )


def _pixels(place: Place) -> str:
    return f"{_x(place[0])} {_y(place[1])}"


def _x(place: float) -> float:
    return round(_LEFT + place * (WIDTH - _LEFT - _RIGHT), 1)


def _y(place: float) -> float:
    return round(HEIGHT - _BOTTOM - place * (HEIGHT - _BOTTOM - _TOP), 1)
