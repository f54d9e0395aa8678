"""The results of the evaluations of runs, as a table needs them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from trainkit.projects.plots.panels import class_metrics, key_order, merge_equal, split_key
from trainkit.projects.plots.runs import Run, is_evaluation

from trainkit.utils.direction import infer_mode


@dataclass(frozen=True)
class Result:
    """The results of one metric in one run; None if there is no value, or it is not finite.

    Attributes:
        best: the iterations done and the best value; also None if the metric's name does not say whether more or less
            is better.
        test: the result on the test data.
    """

    last: float | None
    best: tuple[int, float] | None
    test: float | None


@dataclass(frozen=True)
class Row:
    """A metric in all runs.

    Attributes:
        best_runs: the runs with the best value of the evaluations.
        best_test_runs: the runs with the best value on the test data.
    """

    task: str
    metric: str
    results: list[Result]
    best_runs: set[int]
    best_test_runs: set[int]
    more_is_better: bool


Rows: TypeAlias = list[Row]


def evaluation_results(runs: Sequence[Run]) -> tuple[Rows, Rows]:
    """The results, and those of single classes; metrics with the same values in all runs share a row."""
    names = {
        name.removeprefix("test/") for run in runs for name in run.series if is_evaluation(name)
    }
    tasks: dict[str, dict[str, str]] = {}
    for key in sorted(names, key=key_order):
        task, metric = split_key(key)
        tasks.setdefault(task, {})[metric] = key
    few: Rows = []
    classes: Rows = []
    for task, keys in sorted(tasks.items()):
        of_classes = class_metrics(keys)
        whole = {metric: key for metric, key in keys.items() if metric not in of_classes}
        for metrics in merge_equal(whole, runs):
            few.append(_row(task, " = ".join(metrics), keys[metrics[0]], runs))
        for metric, key in keys.items():
            if metric in of_classes:
                classes.append(_row(task, metric, key, runs))
    return few, classes


def _row(task: str, metric: str, key: str, runs: Sequence[Run]) -> Row:
    mode = infer_mode(key)
    results = []
    for run in runs:
        series = run.series.get(key)
        test = run.series.get(f"test/{key}")
        best = series.best(mode) if series and mode else None
        results.append(Result(series and series.last, best, test and test.last))
    best_values = [result.best and result.best[1] for result in results]
    best_runs = _best_of(mode, best_values)
    best_test_runs = _best_of(mode, [result.test for result in results])
    return Row(task, metric, results, best_runs, best_test_runs, mode == "max")


def _best_of(mode: str | None, values: Sequence[float | None]) -> set[int]:
    """The runs with the best value; empty if all are equal or nothing tells whether more or less is better."""
    finite = [value for value in values if value is not None]
    if mode is None or len(set(finite)) < 2:
        return set()
    best = max(finite) if mode == "max" else min(finite)
    return {number for number, value in enumerate(values) if value == best}
