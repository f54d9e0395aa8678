"""Runs with hooks that have a state, killed at events that are drawn, and resumed; see tests/exactness."""

import pytest

from tests.exactness.jobs import Configured
from tests.exactness.machine import check


def job(*hooks, options=()):
    return Configured(
        "SOLVER.CHECKPOINT_PERIOD", 3, "TEST.EVAL_PERIOD", 2, "HOOKS", [*hooks], *options
    )


EMA = {"NAME": "EMAHook", "DECAY": 0.9, "INTERVAL": 3, "BUFFERS": "average", "EVALUATE": "ema"}
MOMENTUM = {
    "NAME": "ParamScheduler",
    "PARAM": "momentum",
    "SCHEDULES": [{"NAME": "Linear", "END": 4}],
}
DECAY = {
    "NAME": "ParamScheduler",
    "PARAM": "weight_decay",
    "SCHEDULES": [{"NAME": "Cosine", "END_VALUE": 2.0}],
}
PLATEAU = {
    "NAME": "ReduceOnPlateau",
    "VAL_METRIC": "classification/top1",
    "PATIENCE": 1,
    "COOLDOWN": 1,
    "FACTOR": 0.5,
}

JOBS = {
    "an average": job(EMA),
    "an annealed average": job({"NAME": "EMAHook", "KIND": "annealing", "GAMMA": 5, "BEGIN": 3}),
    "a mean": job({"NAME": "EMAHook", "KIND": "mean", "BEGIN": 4}),
    "frozen layers": job({"NAME": "Freeze", "NAMES": ["layers.0.*"], "BEGIN": 2, "END": 6}),
    "schedules of the optimizer": job(MOMENTUM, DECAY),
    "a plateau": job(PLATEAU),
    "precise batch norm": job(
        options=("TEST.PRECISE_BN.ENABLED", True, "TEST.PRECISE_BN.NUM_ITER", 2)
    ),
    "growing windows": Configured("SOLVER.ACCUMULATION_FACTORS", [[3, 2], [6, 4]]),
    "the best files": job(
        options=("CHECKPOINT.BEST_METRIC", "classification/top1", "CHECKPOINT.BEST_TO_KEEP", 2)
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("an average", "a plateau") else pytest.param(name, marks=pytest.mark.slow)
        for name in JOBS
    ],
)
def test_a_run_that_is_killed_at_any_event_and_resumed_ends_as_the_whole_one(tmp_path, name):
    check(JOBS[name], tmp_path, num_kills=4)
