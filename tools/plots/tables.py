"""The differences between runs: their configs and their results."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plots.panels import split_key
from plots.runs import Point, Run, Series
from trainkit.engine.hooks.monitor import infer_mode

_ABSENT = object()
_PLACE = "OUTPUT_DIR"  # always differs


def config_difference(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Key -> its value in each run, for keys whose values differ; "" if a config does not have the key."""
    configs = [run.config for run in runs if run.config is not None]
    keys = sorted({key for config in configs for key in config} - {_PLACE})
    values = {key: [(run.config or {}).get(key, _ABSENT) for run in runs] for key in keys}
    return {
        key: [_as_text(value) for value in row]
        for key, row in values.items()
        if any(config.get(key, _ABSENT) != configs[0].get(key, _ABSENT) for config in configs)
    }


def _as_text(value: Any) -> str:
    if value is _ABSENT:
        return ""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class Result:
    """The results of one metric in one run; None if no value is finite.

    Attributes:
        best: with its iteration; also None if the metric's name does not tell whether more or less is better.
        test: on the test data.
    """

    last: float | None
    best: Point | None
    test: float | None


def evaluation_results(runs: Sequence[Run]) -> dict[str, dict[str, list[Result]]]:
    """Task -> metric -> the result in each run."""
    names = {name for run in runs for name in run.series}
    keys = {name.removeprefix("test/") for name in names if "/" in name}
    tasks: dict[str, dict[str, list[Result]]] = {}
    for key in sorted(keys, key=lambda key: (split_key(key)[0], key.startswith("raw/"), key)):
        task, metric = split_key(key)
        tasks.setdefault(task, {})[metric] = [
            _result(key, run.series.get(key, []), run.series.get(f"test/{key}", [])) for run in runs
        ]
    return tasks


def best_runs(key: str, values: Sequence[float | None]) -> set[int]:
    """The runs with the best value; empty if all are equal or ``key`` does not tell whether more or less is better."""
    finite = [value for value in values if value is not None]
    mode = better(key)
    if mode is None or len(set(finite)) < 2:
        return set()
    best = mode(finite)
    return {number for number, value in enumerate(values) if value == best}


def better(key: str) -> Any:
    """``max`` or ``min``; None if the name of the metric does not tell."""
    try:
        return {"max": max, "min": min}[infer_mode(key)]
    except ValueError:
        return None


def _result(key: str, points: Series, test: Series) -> Result:
    finite = [(iter, value) for iter, value in points if value is not None]
    mode = better(key)
    best = mode(finite, key=lambda point: point[1]) if mode and finite else None
    return Result(points[-1][1] if points else None, best, test[-1][1] if test else None)
