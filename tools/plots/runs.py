"""Reads the files of a run: its metrics and its config."""

import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from trainkit.config import CfgNode, ConfigError

logger = logging.getLogger(__name__)

Point: TypeAlias = tuple[int, float | None]  # iterations done, value; None is not finite
Series: TypeAlias = list[Point]  # sorted by iterations done


class RunError(Exception):
    """The reason why a RUN cannot be shown, in one line."""


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: the shortest part of its path that no other run has.
        folder: the folder of its metrics.json.
        series: metric name -> its points.
        config: dotted key -> value; None if no config can be read.
    """

    name: str
    folder: Path
    series: dict[str, Series]
    config: dict[str, Any] | None

    @property
    def num_done(self) -> int:
        """The number of iterations that are done."""
        return max(points[-1][0] for points in self.series.values())

    def done_after(self, iteration: int) -> int:
        """The number of iterations done; in a file, an evaluation at the end has the length of the run already."""
        return iteration + (iteration != self.num_done)


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
    names = shortest_names([_identity(file) for file in found])
    return [
        Run(
            name + (f" up to {ends[file]}" if file in ends else ""),
            file.parent,
            series,
            configs[file],
        )
        for name, (file, series) in zip(names, found.items(), strict=True)
    ]


def _add_parents(
    found: dict[Path, dict[str, Series]], configs: dict[Path, dict[str, Any] | None]
) -> dict[Path, int]:
    """Add the parents that are not given; returns the number of iterations that each of them did until the fork."""
    ends: dict[Path, int] = {}  # numbers of iterations done
    given, waiting = set(found), [*found]
    for file in waiting:
        config = configs.setdefault(file, _read_config(file.parent / "config.yaml")) or {}
        run, end = config.get("FORK.RUN"), config.get("FORK.ITER")
        parent = (Path(str(run)) / "metrics.json").resolve()
        if not run or not isinstance(end, int) or parent in given:
            continue
        if not parent.is_file():
            logger.warning(
                "%s is a fork of %s, which has no metrics.json and is not drawn", file.parent, run
            )
        elif ends.get(parent, -1) <= end:
            ends[parent] = end + 1
            waiting.append(parent)
    for file, end in ends.items():
        cut = {
            name: [point for point in points if point[0] <= end]
            for name, points in _read_series(file).items()
        }
        found[file] = {name: points for name, points in cut.items() if points}
    return ends


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


def _read_series(file: Path) -> dict[str, Series]:
    series: dict[str, Series] = {}
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
                if value is None or _is_number(value):
                    points = series.setdefault(name, [])
                    # other tools append iterations again
                    while points and points[-1][0] >= iteration:
                        points.pop()
                    points.append(
                        (iteration, value if value is not None and math.isfinite(value) else None)
                    )
    if broken:
        logger.warning("%s: lines without metrics are left out (%s)", file, _name_lines(broken))
    return _count_done(series)


def _count_done(series: dict[str, Series]) -> dict[str, Series]:
    """Replace the numbers of iterations, which count from 0, by the number of iterations that were done.

    Only an evaluation before the first iteration (0) or after the last one (the length of the run) has the number of
    iterations done already. No values of the training are stored there.
    """
    trained = {iter for name, points in series.items() if "/" not in name for iter, _ in points}
    end = max(trained) + 1 if trained else 1 << 63
    at_start = 0 if trained and 0 not in trained else 1
    return {
        name: [(min(iter + 1, end) if iter else at_start, value) for iter, value in points]
        for name, points in series.items()
    }


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # for example the last line of a run that was killed
        return None
    iteration = row.get("iteration") if isinstance(row, dict) else None
    return row if _is_number(iteration) and math.isfinite(iteration) else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)


def _name_lines(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"line {numbers[0]}"
    return f"{len(numbers)} lines, the first is line {numbers[0]}"


def _read_config(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        return _flatten(CfgNode.load_yaml_with_base(str(file)))
    except (ConfigError, OSError) as error:
        logger.warning("%s", error)
        return None


def _flatten(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
