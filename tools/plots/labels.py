"""Places of marks and texts among the curves of a panel, so that none hides another.

Places are fractions of the axes: (0, 0) is at the lower left, (1, 1) at the upper right.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from plots.axis import Axis
from plots.panels import Curve, Panel, better

Place: TypeAlias = tuple[float, float]

_MARK = (0.021, 0.036)  # marks that are nearer than this hide each other
_LETTER, _LINE = 0.0182, 0.075  # the width of a letter, the height of a line
_GAP = 0.045  # between a mark and its text


@dataclass(frozen=True)
class Label:
    """The best value of a metric.

    Attributes:
        mark: the place of the value.
        left, bottom: the place of the text.
    """

    curve: Curve
    text: str
    mark: Place
    left: float
    bottom: float

    @property
    def right(self) -> float:
        return self.left + _LETTER * len(self.text)

    def hides(self, place: Place) -> bool:
        return (
            self.left <= place[0] <= self.right and self.bottom <= place[1] <= self.bottom + _LINE
        )

    def overlaps(self, other: "Label") -> bool:
        beside = self.right <= other.left or other.right <= self.left
        return not beside and abs(self.bottom - other.bottom) < _LINE


def place_marks(panel: Panel, x_axis: Axis, y_axis: Axis) -> list[list[Place]]:
    """The places of the marks of each curve; a test result moves sideways if another mark is at its place."""
    marks: list[list[Place]] = [[] for _ in panel.curves]
    taken: list[Place] = []
    for i, curve in sorted(enumerate(panel.curves), key=lambda entry: entry[1].is_test):
        if curve.is_test or panel.marks(curve):
            places = [
                (x_axis.place(done), y_axis.place(value))
                for piece in curve.pieces
                for done, value in piece
            ]
            marks[i] = [_free_place(place, taken) for place in places] if curve.is_test else places
            taken += marks[i]
    return marks


def _free_place(place: Place, taken: Sequence[Place]) -> Place:
    width, height = _MARK
    for step in itertools.chain.from_iterable((-n, n) for n in range(32)):
        x = place[0] + step * width
        if width / 2 < x < 1 - width / 2 and not any(
            abs(x - other[0]) < width and abs(place[1] - other[1]) < height for other in taken
        ):
            return x, place[1]
    return place


def best_labels(
    panel: Panel, x_axis: Axis, y_axis: Axis, marks: Sequence[Sequence[Place]]
) -> list[Label]:
    """The best value of each metric of an evaluation whose name tells whether more or less is better."""
    labels: list[Label] = []
    if panel.kind != "evaluation":
        return labels
    lines = [_samples(curve, x_axis, y_axis) for curve in panel.curves]
    covered = [*itertools.chain(*lines, *marks)]
    for number, metric in enumerate(panel.metrics):
        mode, curves = (
            better(metric),
            [c for c in panel.curves if c.metric == number and not c.is_test],
        )
        points = [
            (done, value, curve)
            for curve in curves
            for piece in curve.pieces
            for done, value in piece
        ]
        if mode is None or len(points) < 2:
            continue
        best = mode(value for _, value, _ in points)
        done, _, curve = min(
            (point for point in points if point[1] == best), key=lambda point: point[0]
        )
        places = _around(
            curve, f"best {best:.4g} after {done}", (x_axis.place(done), y_axis.place(best))
        )
        free = [label for label in places if not any(map(label.overlaps, labels))]
        if free:
            labels.append(min(free, key=lambda label: sum(map(label.hides, covered))))
    return labels


def _around(curve: Curve, text: str, mark: Place) -> Iterator[Label]:
    """Places for the text above, below and beside its mark, the nearest first."""
    width = _LETTER * len(text)
    for away in range(5):
        for bottom in (mark[1] + _GAP + away * _LINE, mark[1] - _GAP - (away + 1) * _LINE):
            for left in (mark[0] - width / 2, mark[0] - width, mark[0]):
                if 0.01 < bottom < 0.99 - _LINE:
                    yield Label(curve, text, mark, min(max(left, 0.01), 0.99 - width), bottom)


def _samples(curve: Curve, x_axis: Axis, y_axis: Axis) -> Iterator[Place]:
    """Places on the line, near enough that a text cannot be between two of them."""
    for piece in curve.pieces:
        for (x0, y0), (x1, y1) in itertools.pairwise(
            (x_axis.place(x), y_axis.place(y)) for x, y in piece
        ):
            steps = 1 + int(max(abs(x1 - x0), abs(y1 - y0)) / 0.03)
            yield from (
                (x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(steps + 1)
            )
