"""Each job, killed at events that are drawn, and resumed."""

from pathlib import Path

import pytest

from tests.exactness.jobs import GAN, Configured, FiniteData, Forgetful
from tests.exactness.machine import check
from tests.two_ranks import on_two_ranks

HOOKS = [
    {"NAME": "EMAHook", "DECAY": 0.9, "EVALUATE": "both"},
    {"NAME": "ReduceOnPlateau", "VAL_METRIC": "classification/top1", "PATIENCE": 0, "FACTOR": 0.5},
    {"NAME": "ParamScheduler", "PARAM": "momentum", "SCHEDULES": [{"NAME": "Linear", "START_FACTOR": 0.5}]},
]
# periods without a common divisor; 40 samples in epochs of 3 1/3 iterations of 3 times 4
EVERYTHING = ("SOLVER.MAX_ITER", 13, "SOLVER.IMS_PER_BATCH", 4, "SOLVER.ACCUMULATION_STEPS", 3)
EVERYTHING += ("SOLVER.CHECKPOINT_PERIOD", 4, "TEST.EVAL_PERIOD", "1ep", "LOG.PERIOD", 2, "LOG.WINDOW", 5)
EVERYTHING += ("SOLVER.AMP.ENABLED", True, "SOLVER.AMP.PRECISION", "bfloat16", "HOOKS", HOOKS)
EVERYTHING += ("DATASETS.VAL", ("tiny_val",), "CHECKPOINT.BEST_METRIC", "classification/top1")
EVERYTHING += ("CHECKPOINT.MAX_TO_KEEP", 2, "CHECKPOINT.BEST_TO_KEEP", 2)
EVERYTHING += ("EARLY_STOPPING.METRIC", "classification/top1", "EARLY_STOPPING.PATIENCE", 2)

CLIP = ("SOLVER.CLIP_GRADIENTS.ENABLED", True, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "norm")

JOBS = {
    "everything": Configured(*EVERYTHING),
    "everything, asynchronous metrics": Configured(*EVERYTHING, "LOG.ASYNC", True),
    "plain": Configured(),
    "workers": Configured("DATALOADER.NUM_WORKERS", 2, "LOG.PERIOD", 3),
    "fp16": Configured("SOLVER.AMP.ENABLED", True, *CLIP, "SOLVER.AMP.INIT_SCALE", 2.0**20),
    "schedules": Configured("SOLVER.SCHEDULES", [{"NAME": "Cosine", "STEP_SIZE": "1ep"}], "SOLVER.MAX_ITER", "3ep"),
    "asynchronous save": Configured("CHECKPOINT.ASYNC", True, "SOLVER.CHECKPOINT_PERIOD", 3),
    "gan": GAN(),
    "finite data": FiniteData(),
    "finite data, workers": FiniteData(num_workers=2, persistent_workers=True),
    "windows that cross epochs": FiniteData(accumulation_steps=3),
    "a stream": FiniteData(stream=True),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_run_that_is_killed_at_any_event_and_resumed_ends_as_the_whole_one(tmp_path, name):
    check(JOBS[name], tmp_path, num_kills=2 if "workers" in name else 8)


# on two ranks
RANKS = {
    "ddp": Configured("DATALOADER.NUM_WORKERS", 0, *CLIP),
    "fsdp": Configured("MODEL.PARALLEL", "fsdp", *CLIP),
    "logical ranks": Configured("SOLVER.LOGICAL_RANKS", 4),
}


def check_ranks(rank, folder):
    for name, job in RANKS.items():
        check(job, Path(folder) / name, num_kills=3)
    return "same"


@pytest.mark.slow
def test_ranks_that_are_killed_together_and_resumed_end_as_those_that_ran_through(tmp_path):
    assert on_two_ranks([check_ranks], tmp_path)["check_ranks"] == ["same", "same"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_kills"), [("everything", 40), ("gan", None)])
def test_more_events_or_all(tmp_path, name, num_kills):
    check(JOBS[name], tmp_path, num_kills, seed=1)


def test_a_state_that_is_not_saved_is_found(tmp_path):
    with pytest.raises(AssertionError, match="killed at event"):
        check(Forgetful(), tmp_path, num_kills=20)
