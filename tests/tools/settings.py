"""What a setting of a digits job is: the options that switch it on, and how its effect is seen from outside."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from tests.tools.digits_run import MAX_ITER, Run

# base of settings of the training itself: small batches, one evaluated at the end, and a save before the last iteration
QUICK = [
    *("SOLVER.IMS_PER_BATCH", 40, "SOLVER.CHECKPOINT_PERIOD", MAX_ITER - 1, "TEST.EVAL_PERIOD", 0),
    *("DATASETS.VAL", (), "TEST.MAX_BATCHES", 1, "TEST.IMS_PER_BATCH", 20, "TEST.EVALUATORS", ["LossEvaluator"]),
]
IMPORTS = ["IMPORTS", ["projects.digits", "tests.tools.digits_models"]]
EVERY_KIND = [*QUICK, *IMPORTS, "MODEL.NAME", "DigitsOfEveryKind"]
LOSS = "loss/total_loss"  # an evaluation result


class Setting(NamedTuple):
    name: str
    options: list[Any]  # KEY, value, KEY, value, ... behind those of digits_run.OPTIONS
    effect: Callable[[Run], None]  # asserts
    base: Sequence[Any] = ()  # options before these, that the run without the setting has as well


def hook(name: str, **arguments: Any) -> list[Any]:
    """The options for one entry of HOOKS."""
    return ["HOOKS", [{"NAME": name, **arguments}]]


def metric_at(name: str, iterations: list[int]) -> Callable[[Run], None]:
    """The metric is written at these iterations and no others."""

    def effect(run: Run) -> None:
        assert [*run.metric(name)] == iterations

    return effect


def metric_is(name: str, values: dict[int, float]) -> Callable[[Run], None]:
    """The metric has these values at these iterations, whatever it is at others."""

    def effect(run: Run) -> None:
        found = run.metric(name)
        assert {iter: found[iter] for iter in values} == {i: pytest.approx(v, rel=1e-6) for i, v in values.items()}

    return effect


def in_order(*names: str) -> Callable[[Run], None]:
    """These hooks run in this order after a step."""

    def effect(run: Run) -> None:
        assert [name for name in run.hooks_at("after_step") if name in names] == list(names)

    return effect


def no_metric(name: str) -> Callable[[Run], None]:
    def effect(run: Run) -> None:
        assert run.metric(name) == {}

    return effect


def metric_among(name: str, *iterations: int) -> Callable[[Run], None]:
    """The metric is written at these iterations, and maybe others."""

    def effect(run: Run) -> None:
        assert set(iterations) <= {*run.metric(name)}

    return effect


def has_no_files(*suffixes: str) -> Callable[[Run], None]:
    """No file's name ends like this."""

    def effect(run: Run) -> None:
        assert [name for name in run.files if name.endswith(suffixes)] == []

    return effect


def has_files(*names: str) -> Callable[[Run], None]:
    def effect(run: Run) -> None:
        assert [name for name in names if name not in run.files] == []

    return effect


def logs(text: str) -> Callable[[Run], None]:
    def effect(run: Run) -> None:
        assert text in run.log

    return effect


def all_of(*effects: Callable[[Run], None]) -> Callable[[Run], None]:
    def effect(run: Run) -> None:
        for each in effects:
            each(run)

    return effect


def last_weights(run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's state before and behind the last iteration, in runs of QUICK."""
    return run.checkpoint(f"model_{MAX_ITER - 2:07d}")["model"], run.checkpoint()["model"]
