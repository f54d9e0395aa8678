"""Show results as a table or a flat dict, and compare them with expected results."""

import logging
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.evaluation.observer import for_details
from trainkit.utils.logger import format_table
from trainkit.utils.numbers import one_number, unpack

logger = logging.getLogger(__name__)


def flatten_results_dict(results: Mapping[str, Any]) -> dict[str, Any]:
    """Join the keys of nested mappings by "/": ``{"a": {"b": 1}}`` becomes ``{"a/b": 1}``."""
    return {"/".join(path): value for path, value in _leaves(results)}


def result_as_float(name: str, value: Any) -> float:
    """A result of an evaluation as a float.

    Raises ValueError if it is not one number, see `one_number`.
    """
    try:
        return one_number(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the evaluation result {name!r} must be a number, got {value!r}: {error}"
        ) from error


def print_csv_format(results: Mapping[str, Any]) -> None:
    """Log ``{task: {metric: value}}`` as a table with a row per metric.

    With datasets, ``{dataset: {task: {metric: value}}}``, the task is "dataset/task".
    """
    rows = []
    for path, value in _leaves(results):
        *task, metric = path
        value = unpack(value)
        if isinstance(value, float):
            value = f"{value:.4f}"
        rows.append(("/".join(task), metric, value))
    table = "none"
    if rows:
        table = format_table(
            rows,
            ("task", "metric", "value"),
            tablefmt="pipe",
            colalign=("left", "left", "right"),
            disable_numparse=True,
        )
    logger.log(for_details(), "Evaluation results:\n%s", table)


def verify_results(cfg: Any, results: Mapping[str, Any]) -> bool:
    """Compare ``results`` with ``cfg.TEST.EXPECTED_RESULTS``.

    If they differ, log both and exit with code 1. An entry is ``[task, metric, value, tolerance]``;
    with several datasets the task is ``"dataset/task"``. A missing or non-finite result counts as
    different.
    """
    flat_results = flatten_results_dict(results)
    differences = []
    for task, metric, expected, tolerance in cfg.TEST.EXPECTED_RESULTS:
        name = f"{task}/{metric}"
        actual = result_as_float(name, flat_results.get(name, math.nan))
        is_within = abs(actual - expected) <= tolerance  # False for NaN
        if not is_within or math.isinf(actual):
            differences.append(f"{name}: expected {expected} +- {tolerance}, got {actual}")
    if differences:
        logger.error("Results differ from TEST.EXPECTED_RESULTS:\n%s", "\n".join(differences))
        sys.exit(1)
    if cfg.TEST.EXPECTED_RESULTS:
        logger.info("Results agree with TEST.EXPECTED_RESULTS")
    return True


def _leaves(results: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values that are no mappings, each with the keys that lead to it."""
    for key, value in results.items():
        if isinstance(value, Mapping):
            for path, leaf in _leaves(value):
                yield (str(key), *path), leaf
        else:
            yield (str(key),), value
