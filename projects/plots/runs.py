"""Reads the files of a run: its metrics and its config."""

import json
import logging
import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import yaml

from trainkit.utils.direction import infer_mode

logger = logging.getLogger(__name__)

Config: TypeAlias = dict[str, Any]  # dotted key -> value

_ABSENT = object()
_PLACE = "OUTPUT_DIR"  # this setting always differs
_OF_THE_SWEEP = ("HOOKS", "IMPORTS")
_MOST_ITERATIONS = 1 << 53  # a browser cannot count further
_LARGEST_INT = 1 << 63
_EVALUATIONS = ("val", "valid", "validation", "eval", "test")  # the first word of a name


class RunError(Exception):
    """The reason why a RUN cannot be shown, in one line."""


@dataclass(frozen=True, eq=False)
class Series:
    """The values of one metric in one run.

    Attributes:
        done: ``[N]``, int64: the numbers of iterations done, increasing.
        values: ``[N]``, float64; NaN if a value is not finite.
    """

    done: np.ndarray
    values: np.ndarray

    @property
    def last(self) -> float | None:
        """The last value; None if it is not finite."""
        if len(self.values) == 0 or math.isnan(self.values[-1]):
            return None
        return float(self.values[-1])

    def best(self, mode: str) -> tuple[int, float] | None:
        """The iterations done and the first best finite value by ``mode``, "max" or "min"."""
        if np.isnan(self.values).all():
            return None
        place = np.nanargmax(self.values) if mode == "max" else np.nanargmin(self.values)
        return int(self.done[place]), float(self.values[place])

    def up_to(self, done: int) -> "Series":
        """The part until so many iterations were done."""
        part = self.done <= done
        return Series(self.done[part], self.values[part])

    def same_as(self, other: "Series | None") -> bool:
        return (
            other is not None
            and np.array_equal(self.done, other.done)
            and np.array_equal(self.values, other.values, equal_nan=True)
        )


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: short, and different from those of the other runs.
        folder: the folder of its metrics.json.
        series: metric name -> its values, at least one.
        config: None if no config can be read.
    """

    name: str
    folder: Path
    series: dict[str, Series]
    config: Config | None

    @property
    def num_done(self) -> int:
        """The number of iterations that are done."""
        return max(int(series.done[-1]) for series in self.series.values())

    def say_done(self, iteration: int) -> str:
        """When ``iteration`` of a file was; an evaluation at the end has the length of the run already."""
        done = iteration + (iteration != self.num_done)
        return f"after {done} iteration{'s' * (done != 1)}"


def is_evaluation(name: str) -> bool:
    """Whether a metric is a result of an evaluation, such as ``classification/top1`` or ``accuracy``."""
    if "/" in name:
        return not name.startswith("lr/")
    first_word = re.split(r"[^a-z]", name.lower())[0]
    if first_word in _EVALUATIONS:
        return True
    return infer_mode(name) is not None and "loss" not in name


def readable(text: str) -> str:
    """The text with escapes for control characters and for what is no valid character."""
    if text.isprintable():
        return text
    escaped = (
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
    return "".join(escaped)


def read_runs(places: Sequence[str]) -> list[Run]:
    """The runs that have metrics, in the order given; a warning names those without metrics.

    After them come their parents if they are forks, up to the last iteration from which a fork starts.

    Args:
        places: output folders, or JSON files from `trainkit.utils.events.JSONWriter`.

    Raises:
        RunError: a file does not exist or is given twice, or no run has metrics.
    """
    files = [_metrics_file(place) for place in places]
    for i, file in enumerate(files):
        if file in files[:i]:
            raise RunError(f"{places[i]!r} is given twice; name it once")
    found = {file: series for file in files if (series := _read_series(file))}
    if not found:
        raise RunError(
            f"no metrics in {', '.join(map(str, files))}; they come with the first log line of a run"
        )
    for file in files:
        if file not in found:
            logger.warning("%s has no metrics and is left out", file)
    configs = {file: _read_config(file.parent / "config.yaml") for file in found}
    ends = _add_parents(found, configs)
    names = _choose_names([_identity(file) for file in found], [configs[file] for file in found])
    runs = []
    for name, (file, series) in zip(names, found.items(), strict=True):
        if file in ends:
            name = f"{name} up to {ends[file]}"
        runs.append(Run(name, file.parent, series, configs[file]))
    return runs


def config_difference(configs: Sequence[Config | None]) -> dict[str, list[str]]:
    """Key -> its value in each run, for keys whose values differ; "" if a config does not have the key."""
    known = [config for config in configs if config is not None]
    keys = sorted({key for config in known for key in config} - {_PLACE})
    difference = {}
    for key in keys:
        if any(config.get(key, _ABSENT) != known[0].get(key, _ABSENT) for config in known):
            values = [(config or {}).get(key, _ABSENT) for config in configs]
            difference[key] = [_as_text(value) for value in values]
    return difference


def _as_text(value: Any) -> str:
    if value is _ABSENT:
        return ""
    if isinstance(value, str) and value:
        return readable(value)
    return readable(json.dumps(value, ensure_ascii=False, default=str))


# ---------------------------------------------------------------------------- names


def _choose_names(paths: Sequence[Path], configs: Sequence[Config | None]) -> list[str]:
    names = [readable(name) for name in shortest_names(paths)]
    if len(names) > 1 and all("=" in name for name in names):
        by_settings = _names_of_sweep(config_difference(configs))
        if len(set(by_settings)) == len(names):
            return by_settings
    return names


def _names_of_sweep(difference: Mapping[str, Sequence[str]]) -> list[str]:
    """The settings that differ, such as ``BASE_LR=0.1 FOLD=0``; the folders of a sweep name all settings.

    A config does not say a setting that is not set, so this run's name leaves it out.
    """
    # the hook of a sweep is no setting by which runs are compared
    difference = {key: value for key, value in difference.items() if key not in _OF_THE_SWEEP}
    short = {key: key.rpartition(".")[2] for key in difference}
    settings = []
    for key, values in difference.items():
        is_unique = [*short.values()].count(short[key]) == 1
        title = short[key] if is_unique else key
        settings.append([f"{title}={_rounded(value)}" if value else "" for value in values])
    return [" ".join(filter(None, of_run)) for of_run in zip(*settings, strict=True)]


def _rounded(value: str) -> str:
    """A float with four digits; any other text as it is."""
    if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", value):
        return f"{float(value):.4g}"
    return value


def shortest_names(paths: Sequence[Path]) -> list[str]:
    """The end of each path that no other path has, after the common end of all paths is dropped."""
    parts = [path.parts for path in paths]
    while len(parts) > 1 and len({path[-1] for path in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [path[:-1] for path in parts]
    return [
        "/".join(_own_end(path, [other for other in parts if other is not path])) for path in parts
    ]


def _own_end(path: tuple[str, ...], others: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    ends = (path[-length:] for length in range(1, len(path) + 1))
    return next((end for end in ends if all(other[-len(end) :] != end for other in others)), path)


# ---------------------------------------------------------------------------- files


def _metrics_file(place: str) -> Path:
    path = Path(place)
    file = path / "metrics.json" if path.is_dir() else path
    if not file.is_file():
        raise RunError(
            f"there is no run at {place!r}; give an output folder with a metrics.json, or such a file"
        )
    return file.resolve()


def _identity(file: Path) -> Path:
    return file.parent if file.name == "metrics.json" else file.with_suffix("")


def _add_parents(
    found: dict[Path, dict[str, Series]], configs: dict[Path, Config | None]
) -> dict[Path, int]:
    """Add the parents that are not given; returns the number of iterations that each of them did until the fork."""
    ends: dict[Path, int] = {}  # numbers of iterations done
    given = set(found)
    waiting = [*found]
    for file in waiting:
        config = configs.setdefault(file, _read_config(file.parent / "config.yaml")) or {}
        run, end = config.get("FORK.RUN"), config.get("FORK.ITER")
        parent = (Path(readable(str(run))) / "metrics.json").resolve()
        if not run or not isinstance(end, int) or parent in given:
            continue
        if not parent.is_file():
            logger.warning(
                "%s is a fork of %s, which has no metrics.json and is not drawn",
                file.parent,
                parent.parent,
            )
        elif ends.get(parent, -1) <= end:
            ends[parent] = end + 1
            waiting.append(parent)
    for file, end in ends.items():
        parts = {name: series.up_to(end) for name, series in _read_series(file).items()}
        found[file] = {name: part for name, part in parts.items() if len(part.done)}
    return ends


def _read_series(file: Path) -> dict[str, Series]:
    iterations: dict[str, array[int]] = {}
    values: dict[str, array[float]] = {}
    broken = []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            row = _parse(line)
            if row is None:
                broken.append(number)
                continue
            iteration = int(row.pop("iteration"))
            row.pop("epoch", None)  # it repeats the iteration in another form
            for name, value in row.items():
                if type(value) is not float:  # most are
                    number_or_nan = _as_float(value)
                    if number_or_nan is None:
                        continue
                    value = number_or_nan
                if name not in values:
                    iterations[name] = array("q")
                    values[name] = array("d")
                iterations[name].append(iteration)
                values[name].append(value)
    if broken:
        logger.warning("%s: lines without metrics are left out (%s)", file, _name_lines(broken))
    series = {
        name: _without_repeats(np.array(iterations[name]), np.array(values[name]))
        for name in values
    }
    counted = _count_done(series)
    return {readable(name): counted[name] for name in counted}


def _without_repeats(iterations: np.ndarray, values: np.ndarray) -> Series:
    """Without the values that a resumed run has computed again: the later ones count."""
    first_later = np.minimum.accumulate(iterations[::-1])[::-1]
    is_kept = np.ones(len(iterations), bool)
    is_kept[:-1] = iterations[:-1] < first_later[1:]
    kept = values[is_kept]
    kept[np.isinf(kept)] = np.nan
    return Series(iterations[is_kept], kept)


def _count_done(series: Mapping[str, Series]) -> dict[str, Series]:
    """Replace the numbers of iterations, which count from 0, by the number of iterations that were done.

    Only an evaluation before the first iteration (0) or after the last one (the length of the run) has the number of
    iterations done already. No values of the training are stored there.
    """
    trained = [part.done for name, part in series.items() if not is_evaluation(name)]
    end = max((int(done[-1]) for done in trained), default=_MOST_ITERATIONS) + 1
    is_at_start = bool(trained) and all(done[0] > 0 for done in trained)
    counted = {}
    for name, part in series.items():
        done = np.minimum(part.done + 1, end)
        if is_at_start:
            done[part.done == 0] = 0
        counted[name] = Series(done, part.values)
    return counted


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # for example the last line of a run that was killed
        return None
    if not isinstance(row, dict):
        return None
    iteration = row.get("iteration", -1)
    is_number = type(iteration) in (int, float)
    return row if is_number and 0 <= iteration < _MOST_ITERATIONS else None


def _as_float(value: object) -> float | None:
    """A number, and NaN for null; None for anything else."""
    if value is None:
        return math.nan
    if type(value) is int and abs(value) < _LARGEST_INT:
        return float(value)
    return None


def _name_lines(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"line {numbers[0]}"
    return f"{len(numbers)} lines, the first is line {numbers[0]}"


def _read_config(file: Path) -> Config | None:
    if not file.is_file():
        return None
    try:
        # not CfgNode, for which torch would be imported; a run writes its config without _BASE_
        node = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read: %s", file, readable(" ".join(str(error).split())))
        return None
    return _flatten(node) if isinstance(node, dict) else {}


def _flatten(node: Mapping[Any, Any], prefix: str = "") -> Config:
    flat: Config = {}
    for key, value in node.items():
        name = prefix + readable(str(key))
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat
