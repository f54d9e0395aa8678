"""Show results as a table or a flat dict, and compare them with expected results."""

import logging
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.config.config import CfgNode
from trainkit.evaluation.observer import for_details
from trainkit.utils.logger import format_table

logger = logging.getLogger(__name__)


def flatten_results_dict(results: Mapping[str, Any]) -> dict[str, Any]:
    """Join the keys of nested mappings by "/": ``{"a": {"b": 1}}`` becomes ``{"a/b": 1}``."""
    return {"/".join(path): value for path, value in _leaves(results)}


def print_csv_format(results: Mapping[str, Any]) -> None:
    """Log ``{task: {metric: value}}`` as a table with a row per metric; with datasets, the task is "dataset/task"."""
    rows = [
        ("/".join(task), metric, f"{value:.4f}" if isinstance(value, float) else value)
        for (*task, metric), value in _leaves(results)
    ]
    options: dict[str, Any] = {
        "tablefmt": "pipe",
        "colalign": ("left", "left", "right"),
        "disable_numparse": True,
    }
    table = format_table(rows, ("task", "metric", "value"), **options) if rows else "none"
    logger.log(for_details(), "Evaluation results:\n%s", table)


def verify_results(cfg: CfgNode, results: Mapping[str, Any]) -> bool:
    """Compare ``results`` with ``cfg.TEST.EXPECTED_RESULTS``; if they differ, log both and exit with code 1.

    An entry is ``[task, metric, value, tolerance]``; with several datasets the task is ``"dataset/task"``. A missing or
    non-finite result counts as different.
    """
    flat, differ = flatten_results_dict(results), []
    for task, metric, expected, tolerance in cfg.TEST.EXPECTED_RESULTS:
        actual = float(flat.get(f"{task}/{metric}", math.nan))
        if not abs(actual - expected) <= tolerance or math.isinf(
            actual
        ):  # "not": a NaN must not pass
            differ.append(f"{task}/{metric}: expected {expected} +- {tolerance}, got {actual}")
    if differ:
        logger.error("Results differ from TEST.EXPECTED_RESULTS:\n%s", "\n".join(differ))
        sys.exit(1)
    if cfg.TEST.EXPECTED_RESULTS:
        logger.info("Results agree with TEST.EXPECTED_RESULTS")
    return True


def _leaves(results: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in results.items():
        if isinstance(value, Mapping):
            yield from (((str(key), *path), leaf) for path, leaf in _leaves(value))
        else:
            yield (str(key),), value
