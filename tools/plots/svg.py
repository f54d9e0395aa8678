"""Draws a panel as SVG for the page; its colours are in page.css."""

from collections.abc import Iterator
from html import escape

from plots.axis import Axis
from plots.panels import Curve, Panel

WIDTH, HEIGHT = 400, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 8, 8, 34
_MOST_POINTS = 500  # of a line; more would be narrower than a pixel


def draw_svg(panel: Panel, names: list[str], x_axis: Axis) -> str:
    """The curves, each with its values for page.js.

    Args:
        names: of the runs.
    """
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(panel.title)}">']
    y_axis = panel.axis
    for value, text in y_axis.ticks(7):
        y = _y(y_axis, value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y}" dy="0.35em" text-anchor="end">{text}</text>')
    for value, text in x_axis.ticks(5):
        x = _x(x_axis, value)
        parts.append(f'<path class="grid" d="M{x} {_TOP}V{HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{x}" y="{HEIGHT - _BOTTOM + 14}" text-anchor="middle">{text}</text>')
    parts.append(f'<path class="base" d="M{_LEFT} {HEIGHT - _BOTTOM}H{WIDTH - _RIGHT}"/>')
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}" text-anchor="end">iteration</text>')
    parts += [_draw(curve, panel, names, x_axis, y_axis) for curve in panel.curves]
    return "\n".join([*parts, "</svg>"])


def draw_sample(metric: int) -> str:
    """A sample of a metric's line style, for a legend."""
    return f'<svg class="sample" viewBox="0 0 26 8"><path class="line dash{metric}" d="M1 4H25"/></svg>'


def _draw(curve: Curve, panel: Panel, names: list[str], x_axis: Axis, y_axis: Axis) -> str:
    pieces = [thin(piece) for piece in curve.pieces]
    points = [point for piece in pieces for point in piece]
    places = [[f"{_x(x_axis, iter)} {_y(y_axis, value)}" for iter, value in piece] for piece in pieces]
    label = " · ".join([names[curve.run], panel.metrics[curve.metric], *(["test data"] if curve.is_test else [])])
    data = f'data-label="{escape(label)}" data-iters="{" ".join(str(iter) for iter, _ in points)}" '
    data += f'data-values="{" ".join(f"{value:.6g}" for _, value in points)}"'
    # close a piece of one point: its round ends are then drawn
    line = "".join("M" + "L".join(piece) + ("Z" if len(piece) == 1 else "") for piece in places)
    shapes = [f'<path class="line dash{curve.metric}" d="{line}"/>']
    if curve.is_test or panel.marks(curve):
        shape = "M-5 0L0-5L5 0L0 5Z" if curve.is_test else "M-3 0A3 3 0 1 1 3 0A3 3 0 1 1-3 0Z"
        shapes += [
            f'<path class="mark" transform="translate({place})" d="{shape}"/>' for piece in places for place in piece
        ]
    shapes += [
        f'<path class="cross" d="M{_x(x_axis, iter) - 4} {HEIGHT - _BOTTOM - 10}l8 8m-8 0l8-8"/>'
        for iter in curve.not_finite
    ]
    return f'<g class="curve run{curve.run}" {data}>{"".join(shapes)}</g>'


def thin(points: list[tuple[int, float]], most: int = _MOST_POINTS) -> list[tuple[int, float]]:
    """Fewer points: the lowest and the highest of neighbours, the first and the last. So no peak is lost."""
    if len(points) <= most:
        return points
    size = -(-2 * len(points) // (most - 2))
    return [points[0], *_extremes(points[1:-1], size), points[-1]]


def _extremes(points: list[tuple[int, float]], size: int) -> Iterator[tuple[int, float]]:
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        yield from sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})


def _x(axis: Axis, iter: float) -> float:
    return round(_LEFT + axis.place(iter) * (WIDTH - _LEFT - _RIGHT), 1)


def _y(axis: Axis, value: float) -> float:
    return round(HEIGHT - _BOTTOM - axis.place(value) * (HEIGHT - _BOTTOM - _TOP), 1)
