"""Optimizers, clipping, accumulation, precision, schedules: what a checkpoint must bring back."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from tests.tools.digits_run import MAX_ITER, Run
from tests.tools.settings import EVERY_KIND, IMPORTS, QUICK, Setting, all_of, last_weights, metric_at, metric_is

LR = 0.1
# base of settings by which an update, LR times the gradient, is changed
BARE = [*QUICK, "SOLVER.MOMENTUM", 0.0, "SOLVER.NESTEROV", False, "SOLVER.WEIGHT_DECAY", 0.0]


def values(name: str, schedule: Callable[[int], float]) -> Callable[[Run], None]:
    """The metric is this function of the iteration."""
    return metric_is(name, {iter: schedule(iter) for iter in range(MAX_ITER)})


def schedules(*entries: dict[str, Any]) -> list[Any]:
    return ["SOLVER.SCHEDULES", [*entries]]


def last_updates(run: Run) -> dict[str, Tensor]:
    """name -> by how much the last iteration has lowered a parameter."""
    before, after = last_weights(run)
    return {name: before[name] - after[name] for name in before if name.endswith(("weight", "bias"))}


def norms(weights: dict[str, Tensor], norm_type: float = 2.0) -> list[float]:
    return [weight.norm(norm_type).item() for weight in weights.values()]


def about(value: Any) -> Any:
    return pytest.approx(value, rel=1e-3)


def every_group(**options: Any) -> Callable[[Run], None]:
    """What every parameter group in the checkpoint says."""

    def effect(run: Run) -> None:
        assert all({key: group[key] for key in options} == options for group in run.param_groups())

    return effect


def states(*names: str) -> Callable[[Run], None]:
    """What the optimizer remembers of every parameter in the checkpoint."""

    def effect(run: Run) -> None:
        saved = run.checkpoint()["trainer"]["_trainer"]["optimizer"]["state"].values()
        assert {tuple(sorted(state)) for state in saved} == {names}

    return effect


def every_value_changes_by_the_rate(run: Run) -> None:
    assert norms(last_updates(run), float("inf")) == about([LR] * 14)


ADAMW = {"SOLVER.NESTEROV": False, "SOLVER.OPTIMIZER.NAME": "AdamW", "SOLVER.OPTIMIZER.AMSGRAD": True}
SIGN_SGD = {"SOLVER.NESTEROV": False, "SOLVER.OPTIMIZER.NAME": "SignSGD"}
LAST_LAYER = {"KEY": "layers.15", "MOMENTUM": 0.5}
OPTIMIZERS = [
    Setting("momentum", ["SOLVER.MOMENTUM", 0.5], every_group(momentum=0.5), QUICK),
    Setting("no fused form", ["SOLVER.OPTIMIZER.FUSED", False], every_group(fused=False), QUICK),
    Setting(
        "AdamW",
        [item for pair in ADAMW.items() for item in pair],
        all_of(every_group(amsgrad=True), states("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")),
        QUICK,
    ),
    Setting(
        "a user's optimizer",
        [item for pair in SIGN_SGD.items() for item in pair],
        every_value_changes_by_the_rate,
        [*BARE, *IMPORTS],
    ),
    Setting(
        "an optimizer's option for some parameters",
        ["SOLVER.PARAM_GROUPS.CUSTOM_KEYS", [LAST_LAYER]],
        lambda run: _equal([group["momentum"] for group in run.param_groups()], [0.9, 0.9, 0.5]),
        QUICK,
    ),
    Setting(
        "a schedule after another",
        schedules(
            {"NAME": "Linear", "END": 5, "START_FACTOR": 0.2},
            {"NAME": "Step", "BEGIN": 5, "STEP_SIZE": "1ep", "GAMMA": 0.5},
        ),
        values("lr", lambda t: LR * (0.2 + 0.2 * t if t < 5 else 0.5 ** ((t - 5) // 30))),
        QUICK,
    ),
    Setting(
        "momentum by a schedule",
        [
            "HOOKS",
            [{"NAME": "ParamScheduler", "PARAM": "momentum", "SCHEDULES": [{"NAME": "Exponential", "GAMMA": 0.9}]}],
        ],
        values("momentum", lambda t: 0.9 * 0.9**t),
        QUICK,
    ),
]


def _equal(found: Any, expected: Any) -> None:
    assert found == expected


# ---------------------------------------------------------------------------- the step


def clip(kind: str, value: float, **options: Any) -> list[Any]:
    options = {"ENABLED": True, "CLIP_TYPE": kind, "CLIP_VALUE": value, **options}
    return [item for key, value in options.items() for item in (f"SOLVER.CLIP_GRADIENTS.{key}", value)]


def all_gradients_together_have(norm: float, norm_type: float = 2.0) -> Callable[[Run], None]:
    def effect(run: Run) -> None:
        total = sum(each**norm_type for each in norms(last_updates(run), norm_type)) ** (1 / norm_type)
        assert total == about(LR * norm)

    return effect


def no_value_is_above(value: float) -> Callable[[Run], None]:
    def effect(run: Run) -> None:
        assert max(norms(last_updates(run), float("inf"))) == about(LR * value)

    return effect


def batches_in_all(number: int) -> Callable[[Run], None]:
    """The micro-batches of all iterations."""

    def effect(run: Run) -> None:
        assert run.checkpoint()["model"]["layers.1.num_batches_tracked"] == number
        assert [*run.metric("lr")] == [*range(MAX_ITER)]

    return effect


def weights_are_float32(run: Run) -> None:
    assert {str(value.dtype) for value in run.checkpoint()["model"].values()} == {"torch.float32"}


def saved_scale(scale: float | None) -> Callable[[Run], None]:
    def effect(run: Run) -> None:
        assert run.checkpoint()["trainer"]["_trainer"]["grad_scaler"].get("scale") == scale

    return effect


CLIPPED = metric_at("grad_norm", [*range(MAX_ITER)])
AMP = ["SOLVER.AMP.ENABLED", True]
SCALE, SKIPPED = "[metric]grad_scaler", "skipped_updates"
STEPS = [
    Setting("clipping by value", clip("value", 0.003), all_of(no_value_is_above(0.003), CLIPPED), BARE),
    Setting(
        "clipping of the whole model",
        clip("full_model", 0.05),
        all_of(all_gradients_together_have(0.05), CLIPPED),
        BARE,
    ),
    Setting(
        "accumulation",
        ["SOLVER.ACCUMULATION_STEPS", 2],
        batches_in_all(2 * MAX_ITER),
        QUICK,
    ),
    Setting(
        "accumulation that grows",
        ["HOOKS", [{"NAME": "AccumulationSchedule", "FACTORS": [[6, 2]]}]],
        batches_in_all(6 + 2 * (MAX_ITER - 6)),
        QUICK,
    ),
    Setting(
        "short epochs",
        ["SOLVER.MAX_BATCHES_PER_EPOCH", 2, "SOLVER.CHECKPOINT_PERIOD", "3ep"],
        lambda run: run.checkpoint("model_0000005"),
        QUICK,
    ),
    Setting(
        "gradients are let go before the forward pass",
        ["SOLVER.ZERO_GRAD_BEFORE_FORWARD", True],
        values("has_gradients", lambda t: 0.0),
        EVERY_KIND,
    ),
    Setting(
        "float16",
        AMP,
        all_of(
            values("eps", lambda t: 2.0**-10),
            values(SCALE, lambda t: 65536.0),
            values(SKIPPED, lambda t: 0.0),
            weights_are_float32,
        ),
        EVERY_KIND,
    ),
    Setting(
        "float16 that overflows",
        ["SOLVER.AMP.INIT_SCALE", 2.0**100],
        all_of(
            values(SCALE, lambda t: 2.0 ** (100 - t)),
            values(SKIPPED, lambda t: t + 1),
            saved_scale(2.0 ** (100 - MAX_ITER)),
        ),
        [*QUICK, *AMP],
    ),
    Setting(
        "float16 of a fixed scale",
        ["SOLVER.AMP.LOSS_SCALE", 128.0],
        all_of(values(SCALE, lambda t: 128.0), saved_scale(None)),
        [*QUICK, *AMP],
    ),
    Setting(
        "bfloat16",
        [*AMP, "SOLVER.AMP.PRECISION", "bfloat16"],
        all_of(values("eps", lambda t: 2.0**-7), saved_scale(None), weights_are_float32),
        EVERY_KIND,
    ),
    Setting(
        "another number of workers",
        ["SOLVER.REFERENCE_WORLD_SIZE", 2, "SOLVER.MAX_ITER", 6, "SOLVER.CHECKPOINT_PERIOD", 3],
        all_of(values("lr", lambda t: 0.05), lambda run: run.checkpoint("model_0000005")),
        QUICK,
    ),
    Setting("another batch size", ["SOLVER.REFERENCE_BATCH_SIZE", 80], values("lr", lambda t: 0.05), QUICK),
]

OPTIMIZATION = [*OPTIMIZERS, *STEPS]
