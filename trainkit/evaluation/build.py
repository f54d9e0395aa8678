"""Build evaluators by name."""

from collections.abc import Mapping
from typing import Any, cast

from trainkit.config.config import CfgNode
from trainkit.evaluation.evaluator import DatasetEvaluator, DatasetEvaluators
from trainkit.utils.errors import ConfigError, look_up, not_accepted
from trainkit.utils.registry import Registry

EVALUATOR_REGISTRY = Registry("EVALUATOR")
"""Classes or functions that take ``(cfg, dataset_name)`` and return a ``DatasetEvaluator``."""


def build_evaluator(cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
    """Build the evaluators of ``cfg.TEST.EVALUATORS``; several become one ``DatasetEvaluators``.

    An entry is a name, or ``{NAME: LossEvaluator, WEIGHT: num_tokens}`` with arguments of the
    evaluator in upper case.

    Raises:
        ConfigError: ``cfg.TEST.EVALUATORS`` is empty, an entry is wrong or there twice, nothing is
            registered under a name, or two evaluators report the same task.
    """
    entries = cfg.TEST.EVALUATORS
    if not entries:
        raise not_accepted(
            "TEST.EVALUATORS", entries, f"names such as LossEvaluator, to evaluate {dataset_name!r}"
        )
    evaluators = []
    for number, entry in enumerate(entries):
        if entry in entries[:number]:
            raise not_accepted("TEST.EVALUATORS", entries, "each evaluator once")
        evaluators.append(_build_one(cfg, dataset_name, entry))
    if len(evaluators) == 1:
        return evaluators[0]
    try:
        return DatasetEvaluators(evaluators)
    except ValueError as error:
        raise ConfigError(f"TEST.EVALUATORS: {error}") from error


def _build_one(cfg: CfgNode, dataset_name: str, entry: Any) -> DatasetEvaluator:
    if isinstance(entry, Mapping):
        name = entry.get("NAME")
        arguments = {key.lower(): value for key, value in entry.items() if key != "NAME"}
    else:
        name = entry
        arguments = {}
    if not isinstance(name, str):
        accepted = "a name, or {NAME: a name, ...} with arguments in upper case"
        raise not_accepted("TEST.EVALUATORS", entry, accepted)
    if not arguments:
        called_with = ("cfg", "dataset_name")
        make = look_up(EVALUATOR_REGISTRY, name, "TEST.EVALUATORS", called_with)
        return cast(DatasetEvaluator, make(cfg, dataset_name))
    make = look_up(EVALUATOR_REGISTRY, name, "TEST.EVALUATORS")
    try:
        return cast(DatasetEvaluator, make(cfg, dataset_name, **arguments))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"TEST.EVALUATORS: {name}: {error}") from error
