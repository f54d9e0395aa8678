"""The learning rate and other fields of the optimizer, as functions of the iteration."""

import math
from collections.abc import Callable
from typing import Any

from tests.tools.digits_run import MAX_ITER, Run
from tests.tools.settings import IMPORTS, QUICK, Setting, all_of, hook, metric_is


def values(name: str, schedule: Callable[[int], float]) -> Callable[[Run], None]:
    """The metric is this function of the iteration."""
    return metric_is(name, {iter: schedule(iter) for iter in range(MAX_ITER)})


def lr(schedule: Callable[[int], float]) -> Callable[[Run], None]:
    """The learning rate is 0.1 times this function of the iteration."""
    return values("lr", lambda t: 0.1 * schedule(t))


def cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


def schedules(*entries: dict[str, Any]) -> list[Any]:
    return ["SOLVER.SCHEDULES", [*entries]]


def warmup(method: str, iters: Any = 4, **options: Any) -> list[Any]:
    options = {"WARMUP_METHOD": method, "WARMUP_ITERS": iters, "WARMUP_FACTOR": 0.1, **options}
    return [item for key, value in options.items() for item in (f"SOLVER.{key}", value)]


LISTED = [
    Setting(
        "constant",
        schedules({"NAME": "Constant", "END": 4, "FACTOR": 0.25}),
        lr(lambda t: 0.25 if t < 3 else 1),
        QUICK,
    ),
    Setting(
        "linear",
        schedules({"NAME": "Linear", "END": 5, "START_FACTOR": 0.2}),
        lr(lambda t: 0.2 + 0.8 * min(t, 4) / 4),
        QUICK,
    ),
    Setting(
        "exponential warm-up",
        schedules({"NAME": "ExponentialWarmup", "END": 5, "FACTOR": 1 / 16}),
        lr(lambda t: 2.0 ** (min(t, 4) - 4)),
        QUICK,
    ),
    Setting("step", schedules({"NAME": "Step", "STEP_SIZE": 5, "GAMMA": 0.5}), lr(lambda t: 0.5 ** (t // 5)), QUICK),
    Setting(
        "multi-step",
        schedules({"NAME": "MultiStep", "MILESTONES": [4, 9], "GAMMA": 0.5}),
        lr(lambda t: 1 if t < 4 else 0.5 if t < 9 else 0.25),
        QUICK,
    ),
    Setting("exponential", schedules({"NAME": "Exponential", "GAMMA": 0.9}), lr(lambda t: 0.9**t), QUICK),
    Setting(
        "cosine", schedules({"NAME": "Cosine", "END_VALUE": 0.01}), lr(lambda t: cosine(1, 0.1, t / MAX_ITER)), QUICK
    ),
    Setting(
        "cosine restarts",
        schedules({"NAME": "CosineRestarts", "PERIODS": [4, 8], "WEIGHTS": [1, 0.5]}),
        lr(lambda t: cosine(1, 0, t / 4) if t < 4 else cosine(0.5, 0, (t - 4) / 8)),
        QUICK,
    ),
    Setting(
        "polynomial",
        schedules({"NAME": "Polynomial", "POWER": 2, "END_RATIO": 0.1}),
        lr(lambda t: 0.1 + 0.9 * (1 - t / 11) ** 2),
        QUICK,
    ),
    Setting(
        "one cycle",
        schedules(
            {"NAME": "OneCycle", "PCT_START": 0.25, "ANNEAL": "linear", "DIV_FACTOR": 10, "FINAL_DIV_FACTOR": 10}
        ),
        lr(lambda t: 0.1 + 0.9 * t / 2 if t < 2 else 0.01 + 0.99 * (11 - t) / 9),
        QUICK,
    ),
    Setting(
        "inverse square root",
        schedules({"NAME": "InverseSquareRoot", "TIMESCALE": 4}),
        lr(lambda t: math.sqrt(4 / (4 + t))),
        QUICK,
    ),
    Setting(
        "warm-up, stable, decay",
        schedules({"NAME": "WarmupStableDecay", "WARMUP": 3, "DECAY": 4}),
        lr(lambda t: min(t / 3, 1, (11 - t) / 4)),
        QUICK,
    ),
    Setting(
        "a user's schedule", schedules({"NAME": "Sawtooth", "TEETH": 3}), lr(lambda t: 1 + t % 3), [*QUICK, *IMPORTS]
    ),
    Setting(
        "one behind the other",
        schedules({"NAME": "Linear", "END": 4, "START_FACTOR": 0.1}, {"NAME": "Cosine", "BEGIN": 4, "END": 10}),
        lr(lambda t: 0.1 + 0.9 * t / 3 if t < 4 else cosine(1, 0, (min(t, 9) - 4) / 6)),
        QUICK,
    ),
    Setting(
        "one behind the other, in epochs",
        schedules(
            {"NAME": "Linear", "END": "1ep", "START_FACTOR": 0.5},
            {"NAME": "MultiStep", "BEGIN": "1ep", "MILESTONES": ["2ep"]},
        ),
        lr(lambda t: (0.5, 0.75)[t] if t < 2 else 1 if t < 9 else 0.1),
        [*QUICK, "SOLVER.IMS_PER_BATCH", 400],
    ),
    Setting(
        "one over the other",
        schedules({"NAME": "Linear", "END": 5, "START_FACTOR": 0.2}, {"NAME": "Step", "STEP_SIZE": 2, "GAMMA": 0.5}),
        lr(lambda t: (0.2 + 0.8 * min(t, 4) / 4) * 0.5 ** (t // 2)),
        QUICK,
    ),
]

NAMED = [
    Setting(
        "WarmupMultiStepLR",
        ["SOLVER.STEPS", [6, 9], "SOLVER.GAMMA", 0.5],
        lr(lambda t: 1 if t < 6 else 0.5 if t < 9 else 0.25),
        QUICK,
    ),
    Setting(
        "WarmupMultiStepLR in epochs",
        ["SOLVER.STEPS", ["2ep"]],
        lr(lambda t: 1 if t < 6 else 0.1),
        [*QUICK, "SOLVER.IMS_PER_BATCH", 400],
    ),
    Setting(
        "WarmupCosineLR",
        ["SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR", "SOLVER.BASE_LR_END", 0.01],
        lr(lambda t: cosine(1, 0.1, t / MAX_ITER)),
        QUICK,
    ),
    Setting(
        "WarmupStepWithFixedGammaLR",
        ["SOLVER.LR_SCHEDULER_NAME", "WarmupStepWithFixedGammaLR", "SOLVER.NUM_DECAYS", 3, "SOLVER.GAMMA", 0.5],
        lr(lambda t: 0.5 ** (t // 3)),
        QUICK,
    ),
    Setting("linear warm-up", warmup("linear"), lr(lambda t: 0.1 + 0.9 * min(t, 4) / 4), QUICK),
    Setting("constant warm-up", warmup("constant"), lr(lambda t: 0.1 if t < 4 else 1), QUICK),
    Setting(
        "exponential warm-up of a named schedule",
        warmup("exponential"),
        lr(lambda t: 0.1 ** (1 - min(t, 4) / 4)),
        QUICK,
    ),
    Setting(
        "warm-up in epochs",
        warmup("constant", "2ep"),
        lr(lambda t: 0.1 if t < 6 else 1),
        [*QUICK, "SOLVER.IMS_PER_BATCH", 400],
    ),
    Setting(
        "warm-up before the schedule, not over its beginning",
        ["SOLVER.RESCALE_INTERVAL", True],
        lr(lambda t: 0.1 + 0.9 * t / 4 if t < 4 else cosine(1, 0, (t - 4) / 8)),
        [*QUICK, *warmup("linear", LR_SCHEDULER_NAME="WarmupCosineLR")],
    ),
]


def field(param: str, *entries: dict[str, Any]) -> list[Any]:
    return hook("ParamScheduler", PARAM=param, SCHEDULES=[*entries])


def is_left_at(**options: Any) -> Callable[[Run], None]:
    """What both parameter groups in the final checkpoint say."""

    def effect(run: Run) -> None:
        assert [{key: group[key] for key in options} for group in run.param_groups()] == [options, options]

    return effect


STEP = {"NAME": "Step", "STEP_SIZE": 6, "GAMMA": 0.5}
ADAM = [*QUICK, "SOLVER.OPTIMIZER.NAME", "Adam", "SOLVER.NESTEROV", False]
FIELDS = [
    Setting(
        "schedule of the weight decay",
        field("weight_decay", {**STEP, "GAMMA": 0.1}),
        metric_is("weight_decay", {0: 1e-3, 5: 1e-3, 6: 1e-4, 11: 1e-4}),
        QUICK,
    ),
    Setting(
        "schedule of the weight decay over the whole run",
        field("weight_decay", {"NAME": "Cosine"}),
        values("weight_decay", lambda t: 1e-3 * cosine(1, 0, t / MAX_ITER)),
        QUICK,
    ),
    Setting(
        "schedule of the momentum",
        field("momentum", STEP),
        all_of(values("momentum", lambda t: 0.9 if t < 6 else 0.45), is_left_at(momentum=0.45)),
        QUICK,
    ),
    Setting(
        "schedule of the momentum of Adam",
        field("momentum", STEP),
        all_of(values("momentum", lambda t: 0.9 if t < 6 else 0.45), is_left_at(betas=(0.45, 0.999))),
        ADAM,
    ),
    Setting(
        "schedule of the second of the betas",
        field("betas.1", STEP),
        all_of(values("betas.1", lambda t: 0.999 if t < 6 else 0.4995), is_left_at(betas=(0.9, 0.4995))),
        ADAM,
    ),
    Setting(
        "schedule of the learning rate by a hook",
        [
            "HOOKS",
            [{"NAME": "LRScheduler", "ENABLED": False}, {"NAME": "ParamScheduler", "PARAM": "lr", "SCHEDULES": [STEP]}],
        ],
        values("lr", lambda t: 0.1 if t < 6 else 0.05),
        QUICK,
    ),
]

SCHEDULES = [*LISTED, *NAMED, *FIELDS]
