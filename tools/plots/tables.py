"""The differences between runs: their configs and their results."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from plots.panels import better, class_metrics, key_order, merge_equal, split_key
from plots.runs import Point, Run, Series

_ABSENT = object()
_PLACE = "OUTPUT_DIR"  # this setting always differs


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
    return (
        value
        if isinstance(value, str) and value
        else json.dumps(value, ensure_ascii=False, default=str)
    )


@dataclass(frozen=True)
class Result:
    """The results of one metric in one run; None if no value is finite.

    Attributes:
        best: the best value, with the iterations done; also None if the metric's name does not say whether more or less
            is better.
        test: the result on the test data.
    """

    last: float | None
    best: Point | None
    test: float | None


Results: TypeAlias = dict[str, dict[str, list[Result]]]  # task -> metric -> the result in each run


def evaluation_results(runs: Sequence[Run]) -> tuple[Results, Results]:
    """The results, and those of single classes; metrics with the same values in all runs share an entry."""
    names = {name for run in runs for name in run.series}
    keys: dict[str, dict[str, str]] = {}
    for key in sorted({name.removeprefix("test/") for name in names if "/" in name}, key=key_order):
        task, metric = split_key(key)
        keys.setdefault(task, {})[metric] = key
    few: Results = {}
    classes: Results = {}
    for task, by_metric in sorted(keys.items()):
        of_classes = class_metrics(by_metric)
        for metrics in merge_equal(
            {metric: by_metric[metric] for metric in by_metric if metric not in of_classes}, runs
        ):
            few.setdefault(task, {})[" = ".join(metrics)] = _row(by_metric[metrics[0]], runs)
        for metric in filter(of_classes.__contains__, by_metric):
            classes.setdefault(task, {})[metric] = _row(by_metric[metric], runs)
    return few, classes


def _row(key: str, runs: Sequence[Run]) -> list[Result]:
    return [
        _result(key, run.series.get(key, []), run.series.get(f"test/{key}", [])) for run in runs
    ]


def best_runs(key: str, values: Sequence[float | None]) -> set[int]:
    """The runs with the best value; empty if all are equal or ``key`` does not tell whether more or less is better."""
    finite = [value for value in values if value is not None]
    mode = better(key)
    if mode is None or len(set(finite)) < 2:
        return set()
    best = mode(finite)
    return {number for number, value in enumerate(values) if value == best}


def _result(key: str, points: Series, test: Series) -> Result:
    finite = [(iter, value) for iter, value in points if value is not None]
    mode = better(key)
    best = mode(finite, key=lambda point: point[1]) if mode and finite else None
    return Result(points[-1][1] if points else None, best, test[-1][1] if test else None)
