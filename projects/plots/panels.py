"""Which curves are drawn together, and on which axis."""

import colorsys
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
from trainkit.projects.plots.runs import Run, RunError, Series, is_evaluation

from trainkit.utils.direction import infer_mode

logger = logging.getLogger(__name__)

MOST_METRICS = 4  # in a panel: a reader can distinguish this number of line styles
MOST_PANELS = 24
LARGEST = 1e100  # an axis for larger values would overflow
SMALLEST = 1e-100  # the same of smaller values on a logarithmic axis
LOG_RANGE = 10.0  # if values span this factor, a logarithmic axis shows more
NUM_BINS = 1000  # of a long line: more than there are pixels
NUM_MEANS = 200
NOT_FINITE = "✕ from here not finite, or beyond ±1e100"

_MOST_MARKS = 60  # more marks would look like a thick line
_UNLIKE = 10.0  # if the largest values of two metrics differ by more than this factor, they get separate panels
_START = 0.1  # the part of a curve that may leave the axis
_MOST_ZOOM = 6.0  # the axis shows at least this fraction (1/6) of the range of all values
_MARGIN = 0.05  # fraction of the axis that stays free at both ends

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


@dataclass(frozen=True, eq=False)
class Line:
    """One metric of one run.

    Attributes:
        run: the number of the run, which decides the colour.
        metric: the number of the metric in the panel, which decides the line style.
        series: what the run has stored.
        is_test: the values are of the test data, at the end of the run.
        num_above: the number of later runs with the same values, whose lines are drawn on this one.
    """

    run: int
    metric: int
    series: Series
    is_test: bool = False
    num_above: int = 0

    @cached_property
    def _values(self) -> np.ndarray:
        """NaN for those that no axis can show."""
        values = self.series.values
        return np.where(np.abs(values) > LARGEST, np.nan, values)

    @cached_property
    def drawn(self) -> Series:
        """Not more points than pixels can show; NaN for values that no axis can show."""
        return thin(Series(self.series.done, self._values))

    @cached_property
    def means(self) -> Series | None:
        """The means of `NUM_MEANS` parts of a thinned line, each at its last iteration; None for other lines."""
        number = len(self.series.done)
        if number <= 2 * NUM_BINS:
            return None
        values = self._values
        ends = np.linspace(0, number, NUM_MEANS + 1).astype(int)
        counts = np.add.reduceat(~np.isnan(values), ends[:-1], dtype=float)
        counts[counts == 0] = np.nan
        means = np.add.reduceat(np.nan_to_num(values), ends[:-1]) / counts
        return Series(self.series.done[ends[1:] - 1], means)

    @property
    def lonely(self) -> np.ndarray:
        """Which of the drawn points have no neighbour, so that no line shows them."""
        is_gap = np.concatenate([[True], np.isnan(self.drawn.values), [True]])
        return ~is_gap[1:-1] & is_gap[:-2] & is_gap[2:]

    @property
    def gaps(self) -> np.ndarray:
        """The iterations done when values stop to be finite."""
        drawn = self.drawn
        is_gap = np.isnan(drawn.values)
        starts = is_gap & ~np.concatenate([[False], is_gap[:-1]])
        return drawn.done[starts]


@dataclass(frozen=True)
class Best:
    """The best value of a metric in all runs."""

    run: int
    done: int
    value: float


@dataclass
class Panel:
    """
    Attributes:
        metrics: the metric of each line style.
        bests: for each metric; None if its name does not say whether more or less is better.
        more_is_better: by the names of the metrics, as of an accuracy.
        num_classes: the number of metrics of single classes, which are not drawn.
    """

    title: str
    kind: Kind
    metrics: list[str] = field(default_factory=list)
    bests: list[Best | None] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    more_is_better: bool = False
    num_classes: int = 0

    @property
    def values(self) -> np.ndarray:
        """All finite values on the axis."""
        values = np.concatenate([line.drawn.values for line in self.lines])
        return values[~np.isnan(values)]

    @property
    def is_log(self) -> bool:
        """Whether a logarithmic axis shows more; a schedule and an accuracy have a linear one."""
        values = self.values
        if self.kind == "lr" or self.more_is_better:
            return False
        if len(values) == 0 or values.min() < SMALLEST:
            return False
        return bool(values.max() >= LOG_RANGE * values.min())

    def limits(self, log: bool) -> tuple[float, float]:
        """The ends of the axis: without the start of the curves if that needs most of it."""
        values = self._scaled(self.values, log)
        if len(values) == 0:
            return (0.1, 1.0) if log else (0.0, 1.0)
        low, high = values.min(), values.max()
        settled = self._scaled(self._settled, log)
        if self.kind != "evaluation" and len(settled):
            first, last = settled.min(), settled.max()
            if 3 * (last - first) < high - low:
                least = (high - low) / _MOST_ZOOM
                high = min(high, max(last, first + least))
                low = max(low, min(first, high - least))
        room = _MARGIN * (high - low)
        if room < SMALLEST:  # one value
            room = 0.1 * abs(high)
        if room < SMALLEST:  # it is 0
            room = 1.0
        low -= room
        high += room
        return (10.0**low, 10.0**high) if log else (float(low), float(high))

    @staticmethod
    def _scaled(values: np.ndarray, log: bool) -> np.ndarray:
        return np.log10(values[values >= SMALLEST]) if log else values

    @property
    def _settled(self) -> np.ndarray:
        """The finite values after the first part of each curve."""
        parts = []
        for line in self.lines:
            drawn = line.drawn
            start = drawn.done[0] + _START * (drawn.done[-1] - drawn.done[0])
            parts.append(drawn.values[drawn.done >= start])
        values = np.concatenate(parts)
        return values[~np.isnan(values)]

    def has_marks(self, line: Line) -> bool:
        """Whether each point of the line is marked."""
        return self.kind == "evaluation" and len(line.series.done) <= _MOST_MARKS

    @property
    def notes(self) -> list[str]:
        """What a reader has to know of the drawing."""
        notes = []
        if self.num_classes:
            notes.append(f"+ {self.num_classes} of single classes, not drawn")
        values = self.values
        low, high = self.limits(self.is_log)
        if len(values) and values.max() > high:
            notes.append(f"↑ up to {values.max():.3g} at the start")
        if len(values) and values.min() < low:
            notes.append(f"↓ down to {values.min():.3g} at the start")
        if any(line.is_test for line in self.lines):
            notes.append("◇ test data")
        if any(len(line.gaps) for line in self.lines):
            notes.append(NOT_FINITE)
        if any(line.means for line in self.lines):
            notes.append(f"means of {NUM_MEANS} parts; pale: lowest to highest of {NUM_BINS} parts")
        return notes

    def legend(self, names: Sequence[str]) -> list[str]:
        """What each line style means, with the best value; empty if the title says it.

        Args:
            names: of the runs.
        """
        texts = []
        for metric, best in zip(self.metrics, self.bests, strict=True):
            if best is None:
                texts.append(metric)
                continue
            of_run = f" ({names[best.run]})" if len(names) > 1 else ""
            texts.append(f"{metric}   ○ best {best.value:.4g} after {best.done}{of_run}")
        return [] if texts in ([self.title], ["lr"]) else texts


def thin(series: Series) -> Series:
    """Fewer points for a long line: those with the lowest and the highest value of each of `NUM_BINS` parts.

    So no peak is lost, and no gap: the first NaN of a part is kept too.
    """
    number = len(series.done)
    if number <= 2 * NUM_BINS:
        return series
    size = -(-number // NUM_BINS)
    padded = np.full(NUM_BINS * size, np.nan)
    padded[:number] = series.values
    parts = padded.reshape(NUM_BINS, size)
    is_gap = np.isnan(parts)
    places = [
        np.where(is_gap, np.inf, parts).argmin(axis=1),
        np.where(is_gap, -np.inf, parts).argmax(axis=1),
        is_gap.argmax(axis=1),  # the first value of a part without a gap
    ]
    starts = size * np.arange(NUM_BINS)
    kept = np.unique(np.concatenate([starts + place for place in places] + [[number - 1]]))
    kept = kept[kept < number]
    return Series(series.done[kept], series.values[kept])


def run_color(run: int) -> str:
    """The colour of the ``run``-th run, visible on a white and on a dark background."""
    if run < len(_COLORS):
        return _COLORS[run]
    hue = 0.618034 * run % 1  # by the golden ratio, colours of neighbours differ clearly
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, 0.5, 0.55))


def split_key(key: str) -> tuple[str, str]:
    """The task and the metric of a name such as ``raw/classification/top1``: "classification" and "raw top1"."""
    key = key.removeprefix("test/")
    task, _, metric = key.removeprefix("raw/").rpartition("/")
    return task or "evaluation", f"raw {metric}" if key.startswith("raw/") else metric


def key_order(key: str) -> tuple[bool, bool, str]:
    """Sorts the names of metrics, the most important ones first."""
    return key.startswith("raw/"), key.rpartition("/")[2] not in ("total_loss", "time", "lr"), key


def class_metrics(metrics: Iterable[str]) -> set[str]:
    """The metrics of single classes, such as IoU-0, IoU-1 and IoU-2, if a task has many metrics."""
    metrics = [*metrics]
    if len(metrics) <= MOST_METRICS:
        return set()
    stems = {metric: metric.rpartition("-")[0] for metric in metrics}
    counts = Counter(stems.values())
    return {metric for metric, stem in stems.items() if stem and counts[stem] >= 3}


def merge_equal(keys: Mapping[str, str], runs: Sequence[Run]) -> list[list[str]]:
    """Group the metrics that have the same values in all runs; ``keys`` are their names in the runs."""
    groups: dict[tuple[bytes | None, ...], list[str]] = {}
    for metric, key in keys.items():
        values = []
        for run in runs:
            for name in (key, f"test/{key}"):
                series = run.series.get(name)
                values.append(series and series.done.tobytes() + series.values.tobytes())
        groups.setdefault(tuple(values), []).append(metric)
    return [*groups.values()]


def choose_panels(runs: Sequence[Run]) -> list[Panel]:
    """All panels, each with metrics of one kind and size; warns if there are more than `MOST_PANELS`.

    Raises:
        RunError: there is nothing to draw.
    """
    names = {key.removeprefix("test/") for run in runs for key in run.series}
    groups: dict[tuple[int, str], dict[str, str]] = {}
    for key in sorted(names, key=key_order):
        kind = _kind(key)
        if kind is not None:
            title, metric = _title(key, kind)
            groups.setdefault((_ORDER.index(kind), title), {})[metric] = key
    panels: list[Panel] = []
    for order, title in sorted(groups):
        panels += _split(title, _ORDER[order], groups[order, title], runs)
    if not panels:
        folders = ", ".join(str(run.folder) for run in runs)
        raise RunError(f"nothing to draw in {folders}; only {', '.join(_NOT_DRAWN)}")
    if len(panels) > MOST_PANELS:
        left_out = ", ".join(metric for panel in panels[MOST_PANELS:] for metric in panel.metrics)
        logger.warning("Only %d panels are drawn; left out: %s", MOST_PANELS, left_out)
    return panels[:MOST_PANELS]


def _kind(key: str) -> Kind | None:
    if key in _NOT_DRAWN:
        return None
    if key in _TIMES:
        return "time"
    if key == "lr" or key.startswith(("lr_", "lr/")):
        return "lr"
    if is_evaluation(key):
        return "evaluation"
    return "loss" if "loss" in key else "other"


def _title(key: str, kind: Kind) -> tuple[str, str]:
    """The title of its panel, and the name of the metric there."""
    task, metric = split_key(key)
    if kind == "evaluation":
        return "evaluation loss" if task == "loss" else task, metric
    return _TITLES.get(kind, key), key.removeprefix("lr/")


def _split(title: str, kind: Kind, keys: dict[str, str], runs: Sequence[Run]) -> list[Panel]:
    """The panels of one task; metrics with equal values in all runs become one line."""
    classes = class_metrics(keys) if kind == "evaluation" else set()
    drawn = {metric: key for metric, key in keys.items() if metric not in classes}
    panels: list[Panel] = []
    for metrics in merge_equal(drawn, runs):
        key = keys[metrics[0]]
        best = _best(key, runs) if kind == "evaluation" else None
        is_more = kind == "evaluation" and infer_mode(key) == "max"
        alone = Panel(title, kind, [" = ".join(metrics)], [best], _lines(key, runs), is_more)
        panel = next((panel for panel in panels if _fits(alone, panel)), None)
        if panel is None:
            panels.append(alone)
            continue
        panel.lines += [replace(line, metric=len(panel.metrics)) for line in alone.lines]
        panel.metrics += alone.metrics
        panel.bests += alone.bests
    if panels:
        panels[0].num_classes = len(classes)
    return panels


def _best(key: str, runs: Sequence[Run]) -> Best | None:
    mode = infer_mode(key)
    found = []
    for number, run in enumerate(runs):
        best = run.series[key].best(mode) if mode and key in run.series else None
        if best is not None:
            found.append(Best(number, *best))
    if not found:
        return None
    return max(found, key=lambda best: best.value if mode == "max" else -best.value)


def _lines(key: str, runs: Sequence[Run]) -> list[Line]:
    lines = []
    for name in (key, f"test/{key}"):
        for number, run in enumerate(runs):
            if name in run.series:
                series = run.series[name]
                later = (other.series.get(name) for other in runs[number + 1 :])
                num_above = sum(series.same_as(other) for other in later)
                lines.append(Line(number, 0, series, name != key, num_above))
    return lines


def _fits(line: Panel, panel: Panel) -> bool:
    """Whether a metric may be drawn in a panel: of the same size, and more of both is better, or of none."""
    if len(panel.metrics) == MOST_METRICS:
        return False
    if line.kind != "evaluation":
        return True
    if line.more_is_better != panel.more_is_better:
        return False
    low, high = sorted(np.abs(drawn.values).max(initial=0.0) for drawn in (line, panel))
    return bool(low == 0 or high <= _UNLIKE * low)
