"""Which curves are drawn together."""

import colorsys
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from plots.axis import Axis, make_axis
from plots.runs import Run, RunError, Series
from trainkit.engine.hooks.direction import infer_mode

logger = logging.getLogger(__name__)

MOST_METRICS = 4  # in a panel: a reader can distinguish this number of line styles
MOST_PANELS = 24
_MOST_MARKS = 60  # more marks would look like a thick line
_UNLIKE = 10.0  # if the largest values of two metrics differ by more than this factor, they get separate panels
LOG_RANGE = 10.0  # if values span this factor, a logarithmic axis shows more
_START = 0.1  # the part of a curve that may leave the axis
_MOST_ZOOM = 6.0  # the axis shows at least this fraction (1/6) of the range of all values

_COLORS = ["#2f7ed8", "#dd7010", "#1f9d63", "#9b5de5", "#dc3f58", "#0d96a8", "#b0713f", "#d152a0"]

Kind: TypeAlias = Literal["loss", "evaluation", "lr", "other", "time"]
_TITLES: dict[Kind, str] = {
    "loss": "training loss",
    "lr": "learning rate",
    "time": "seconds per step",
}
_ORDER: list[Kind] = ["loss", "evaluation", "lr", "other", "time"]
_TIMES = ("time", "data_time")
_NOT_DRAWN = ("eta_seconds", "rank_data_time")  # they repeat other times


@dataclass(frozen=True)
class Curve:
    """
    Attributes:
        runs: the numbers of the runs that have these values; the first one decides the colour.
        metric: the number of the metric in the panel, which decides the line style.
        is_test: the values are of the test data, at the end of the run.
    """

    runs: tuple[int, ...]
    metric: int
    points: Series
    is_test: bool = False

    @property
    def pieces(self) -> list[list[tuple[int, float]]]:
        """The pieces of the line between points that are not finite."""
        pieces: list[list[tuple[int, float]]] = [[]]
        for done, value in self.points:
            if value is not None:
                pieces[-1].append((done, value))
            elif pieces[-1]:
                pieces.append([])
        return [piece for piece in pieces if piece]

    @property
    def settled(self) -> list[float]:
        """The finite values after the first part of the curve."""
        first, last = self.points[0][0], self.points[-1][0]
        return [
            value
            for done, value in self.points
            if value is not None and done >= first + _START * (last - first)
        ]

    @property
    def not_finite(self) -> list[int]:
        """The iterations done when values become not finite."""
        finite = [True, *(value is not None for _, value in self.points)]
        return [done for i, (done, _) in enumerate(self.points) if finite[i] and not finite[i + 1]]


@dataclass
class Panel:
    """
    Attributes:
        metrics: the metric of each line style.
        num_classes: the number of metrics of single classes, which are not drawn.
    """

    title: str
    kind: Kind
    metrics: list[str] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    num_classes: int = 0

    @property
    def values(self) -> list[float]:
        return [value for curve in self.curves for piece in curve.pieces for _, value in piece]

    @property
    def axis(self) -> Axis:
        """The axis of the values: without the start of the curves if that needs most of it; logarithmic if useful."""
        values = self.values
        if self.kind not in ("loss", "other", "time") or not values:
            return make_axis(values)
        log = min(values) > 0 and max(values) / min(values) >= LOG_RANGE
        settled = [value for curve in self.curves for value in curve.settled] or values
        low, high, first, last = (
            math.log(value) if log else value
            for value in (min(values), max(values), min(settled), max(settled))
        )
        if 3 * (last - first) >= high - low:
            return make_axis(values, log=log)
        last = min(high, max(last, first + (high - low) / _MOST_ZOOM))
        first = max(low, min(first, last - (high - low) / _MOST_ZOOM))
        return make_axis([math.exp(first), math.exp(last)] if log else [first, last], log=log)

    def marks(self, curve: Curve) -> bool:
        """Whether each point of the curve is marked."""
        return self.kind == "evaluation" and len(curve.points) <= _MOST_MARKS

    @property
    def note(self) -> str:
        """What is not drawn."""
        if self.num_classes:
            return f"+ {self.num_classes} of single classes, not drawn"
        axis, values = self.axis, self.values
        if values and max(values) > axis.high:
            return f"↑ up to {max(values):.3g} at the start"
        return (
            f"↓ down to {min(values):.3g} at the start" if values and min(values) < axis.low else ""
        )

    @property
    def legend(self) -> list[tuple[int, str]]:
        """The line styles and their meaning; empty if the title says it."""
        return [] if self.metrics in ([self.title], ["lr"]) else [*enumerate(self.metrics)]

    @property
    def shared(self) -> list[tuple[int, ...]]:
        """The runs of each curve that stands for several runs."""
        return [*dict.fromkeys(curve.runs for curve in self.curves if len(curve.runs) > 1)]


def iter_axis(panels: Iterable[Panel]) -> Axis:
    """The axis of iterations done, the same for all panels, from 0."""
    return make_axis(
        [0, *(done for panel in panels for curve in panel.curves for done, _ in curve.points)],
        margin=0.02,
    )


def run_color(run: int) -> str:
    """The colour of the ``run``-th run, visible on a white and on a dark background."""
    if run < len(_COLORS):
        return _COLORS[run]
    hue = 0.618034 * run % 1  # by the golden ratio, colours of neighbours differ clearly
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, 0.5, 0.55))


def split_key(key: str) -> tuple[str, str]:
    """The task and the metric of a name such as ``raw/classification/top1``: "classification" and "raw top1"."""
    task, _, metric = key.removeprefix("test/").removeprefix("raw/").rpartition("/")
    return task, f"raw {metric}" if key.removeprefix("test/").startswith("raw/") else metric


def class_metrics(metrics: Iterable[str]) -> set[str]:
    """The metrics of single classes, such as IoU-0, IoU-1 and IoU-2, if a task has many metrics."""
    metrics = [*metrics]
    stems = Counter(metric.rpartition("-")[0] for metric in metrics)
    if len(metrics) <= MOST_METRICS:
        return set()
    return {
        metric for metric in metrics if (stem := metric.rpartition("-")[0]) and stems[stem] >= 3
    }


def choose_panels(runs: Sequence[Run]) -> list[Panel]:
    """All panels, each with metrics of one kind and size; warns if there are more than `MOST_PANELS`.

    Raises:
        RunError: there is nothing to draw.
    """
    groups: dict[tuple[int, str], dict[str, str]] = {}
    for key in sorted(
        {key.removeprefix("test/") for run in runs for key in run.series}, key=key_order
    ):
        kind = _kind(key)
        if kind is not None:
            task, metric = split_key(key)
            title = _TITLES.get(kind) or ("evaluation loss" if task == "loss" else task) or metric
            groups.setdefault((_ORDER.index(kind), title), {})[metric] = key
    panels = [
        panel
        for (order, title), keys in sorted(groups.items(), key=lambda group: group[0])
        for panel in _split(title, _ORDER[order], keys, runs)
    ]
    if not panels:
        raise RunError(
            f"nothing to draw in {', '.join(str(run.folder) for run in runs)}; only {', '.join(_NOT_DRAWN)}"
        )
    if len(panels) > MOST_PANELS:
        left_out = ", ".join(metric for panel in panels[MOST_PANELS:] for metric in panel.metrics)
        logger.warning("Only %d panels are drawn; left out: %s", MOST_PANELS, left_out)
    return panels[:MOST_PANELS]


def key_order(key: str) -> tuple[bool, bool, str]:
    """Sorts the names of metrics, the most important ones first."""
    return key.startswith("raw/"), key.rpartition("/")[2] not in ("total_loss", "time", "lr"), key


def _kind(key: str) -> Kind | None:
    if key in _NOT_DRAWN:
        return None
    if key in _TIMES:
        return "time"
    if key == "lr" or key.startswith(("lr_", "lr/")):
        return "lr"
    if "/" in key:
        return "evaluation"
    return "loss" if "loss" in key else "other"


def _split(title: str, kind: Kind, keys: dict[str, str], runs: Sequence[Run]) -> list[Panel]:
    """The panels of one task; metrics with equal values in all runs become one line."""
    classes = class_metrics(keys) if kind == "evaluation" else set()
    panels: list[Panel] = []
    for metrics in merge_equal(
        {metric: key for metric, key in keys.items() if metric not in classes}, runs
    ):
        line = Panel(title, kind, [" = ".join(metrics)], _curves(keys[metrics[0]], runs))
        panel = next((panel for panel in panels if _fits(line, panel)), None)
        if panel is None:
            panels.append(line)
        else:
            panel.curves += [replace(curve, metric=len(panel.metrics)) for curve in line.curves]
            panel.metrics += line.metrics
    if panels:
        panels[0].num_classes = len(classes)
    return panels


def merge_equal(keys: Mapping[str, str], runs: Sequence[Run]) -> list[list[str]]:
    """Group the metrics that have the same values in all runs; ``keys`` are their names in the runs."""
    equal: dict[str, list[str]] = {}
    for metric, key in keys.items():
        values = [(run.series.get(key), run.series.get(f"test/{key}")) for run in runs]
        equal.setdefault(repr(values), []).append(metric)
    return [*equal.values()]


def better(key: str) -> Any:
    """``max`` or ``min``; None if the name of the metric does not say which one is better."""
    mode = infer_mode(key)
    if mode is None:
        return None
    return {"max": max, "min": min}[mode]


def _curves(key: str, runs: Sequence[Run]) -> list[Curve]:
    """One curve for all runs with the same values; each result on the test data is a curve of its own."""
    equal: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        if key in run.series:
            equal.setdefault(repr(run.series[key]), []).append(number)
    lines = [Curve(tuple(numbers), 0, runs[numbers[0]].series[key]) for numbers in equal.values()]
    name = f"test/{key}"
    tests = [
        Curve((number,), 0, run.series[name], True)
        for number, run in enumerate(runs)
        if name in run.series
    ]
    return lines + tests


def _fits(line: Panel, panel: Panel) -> bool:
    if len(panel.metrics) == MOST_METRICS:
        return False
    low, high = sorted(max(map(abs, drawn.values), default=0.0) for drawn in (line, panel))
    return line.kind != "evaluation" or low == 0 or high / low <= _UNLIKE
