"""Which curves are drawn together."""

import colorsys
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from plots.axis import Axis, make_axis
from plots.runs import Run, RunError, Series

logger = logging.getLogger(__name__)

MOST_METRICS = 4  # in a panel: the number of line styles that one can distinguish
MOST_PANELS = 24
_MOST_MARKS = 60  # more marks would look like a thick line
_UNLIKE = 10.0  # if the largest values of two metrics differ by more than this factor, they have another unit
LOG_RANGE = 50.0  # if values span this factor, a logarithmic axis shows more

_COLORS = ["#2f7ed8", "#dd7010", "#1f9d63", "#9b5de5", "#dc3f58", "#0d96a8", "#b0713f", "#d152a0"]

Kind: TypeAlias = Literal["loss", "evaluation", "lr", "other", "time"]
_TITLES: dict[Kind, str] = {"loss": "training loss", "lr": "learning rate", "time": "seconds per step"}
_ORDER: list[Kind] = ["loss", "evaluation", "lr", "other", "time"]
_TIMES = ("time", "data_time")
_NOT_DRAWN = ("eta_seconds", "rank_data_time", "epoch_time")  # they repeat other times


@dataclass(frozen=True)
class Curve:
    """
    Attributes:
        run: the number of the run, which decides the colour.
        metric: the number of the metric in the panel, which decides the line style.
        is_test: the values are of the test data, at the end of the run.
    """

    run: int
    metric: int
    points: Series
    is_test: bool = False

    @property
    def pieces(self) -> list[list[tuple[int, float]]]:
        """The pieces of the line between points that are not finite."""
        pieces: list[list[tuple[int, float]]] = [[]]
        for iteration, value in self.points:
            if value is not None:
                pieces[-1].append((iteration, value))
            elif pieces[-1]:
                pieces.append([])
        return [piece for piece in pieces if piece]

    @property
    def not_finite(self) -> list[int]:
        """The iterations at which values become not finite."""
        finite = [True, *(value is not None for _, value in self.points)]
        return [iteration for i, (iteration, _) in enumerate(self.points) if finite[i] and not finite[i + 1]]


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
        """The axis of the values; logarithmic if that shows more."""
        values = self.values
        may_be_log = self.kind in ("loss", "other", "time") and bool(values) and min(values) > 0
        return make_axis(values, log=may_be_log and max(values) / min(values) >= LOG_RANGE)

    def marks(self, curve: Curve) -> bool:
        """Whether each point of the curve is marked."""
        return self.kind == "evaluation" and len(curve.points) <= _MOST_MARKS

    @property
    def note(self) -> str:
        return f"+ {self.num_classes} of single classes, not drawn" if self.num_classes else ""

    @property
    def legend(self) -> list[tuple[int, str]]:
        """The line styles and their meaning; empty if the title says it."""
        return [] if self.metrics in ([self.title], ["lr"]) else [*enumerate(self.metrics)]


def iter_axis(panels: Iterable[Panel]) -> Axis:
    """The axis of iterations, the same for all panels, from iteration 0."""
    return make_axis(
        [0, *(iter for panel in panels for curve in panel.curves for iter, _ in curve.points)], margin=0.02
    )


def run_color(run: int) -> str:
    """The colour of the ``run``-th run, visible on a white and on a dark background."""
    if run < len(_COLORS):
        return _COLORS[run]
    hue = 0.618034 * run % 1  # the golden ratio keeps neighbours apart
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
    return {metric for metric in metrics if (stem := metric.rpartition("-")[0]) and stems[stem] >= 3}


def choose_panels(runs: Sequence[Run]) -> list[Panel]:
    """All panels, each with metrics of one kind and size; warns if there are more than `MOST_PANELS`.

    Raises:
        RunError: there is nothing to draw.
    """
    groups: dict[tuple[int, str], dict[str, str]] = {}
    for key in sorted({key.removeprefix("test/") for run in runs for key in run.series}, key=_key_order):
        kind = _kind(key)
        if kind is not None:
            task, metric = split_key(key)
            title = _TITLES.get(kind) or task or metric
            groups.setdefault((_ORDER.index(kind), title), {})[metric] = key
    panels = [
        panel
        for (order, title), keys in sorted(groups.items(), key=lambda group: group[0])
        for panel in _split(title, _ORDER[order], keys, runs)
    ]
    if not panels:
        raise RunError(f"nothing to draw in {', '.join(str(run.folder) for run in runs)}; only {', '.join(_NOT_DRAWN)}")
    if len(panels) > MOST_PANELS:
        left_out = ", ".join(metric for panel in panels[MOST_PANELS:] for metric in panel.metrics)
        logger.warning("Only %d panels are drawn; left out: %s", MOST_PANELS, left_out)
    return panels[:MOST_PANELS]


def _key_order(key: str) -> tuple[bool, bool, str]:
    return key.startswith("raw/"), key not in ("total_loss", "time", "lr"), key


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
    equal: dict[str, list[str]] = {}
    for metric, key in keys.items():
        if metric not in classes:
            values = [(run.series.get(key), run.series.get(f"test/{key}")) for run in runs]
            equal.setdefault(repr(values), []).append(metric)
    panels: list[Panel] = []
    for metrics in equal.values():
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


def _curves(key: str, runs: Sequence[Run]) -> list[Curve]:
    return [
        Curve(number, 0, run.series[name], is_test=name != key)
        for number, run in enumerate(runs)
        for name in (key, f"test/{key}")
        if name in run.series
    ]


def _fits(line: Panel, panel: Panel) -> bool:
    if len(panel.metrics) == MOST_METRICS:
        return False
    low, high = sorted(max(map(abs, drawn.values), default=0.0) for drawn in (line, panel))
    return line.kind != "evaluation" or low == 0 or high / low <= _UNLIKE
