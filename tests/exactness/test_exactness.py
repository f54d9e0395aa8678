"""Each job, killed at events that are drawn, and resumed."""

import random
from pathlib import Path

import pytest

from tests.exactness.jobs import GAN, Buckets, Configured, FiniteData, Forgetful, Student
from tests.exactness.machine import check
from tests.two_ranks import on_two_ranks
from trainkit.engine import SimpleTrainer, step

HOOKS = [
    {"NAME": "EMAHook", "DECAY": 0.9, "EVALUATE": "both"},
    {"NAME": "ReduceOnPlateau", "VAL_METRIC": "classification/top1", "PATIENCE": 0, "FACTOR": 0.5},
    {
        "NAME": "ParamScheduler",
        "PARAM": "momentum",
        "SCHEDULES": [{"NAME": "Linear", "START_FACTOR": 0.5}],
    },
]
# periods without a common divisor; 40 samples in epochs of 3 1/3 iterations of 3 times 4
EVERYTHING = ("SOLVER.MAX_ITER", 13, "SOLVER.IMS_PER_BATCH", 4, "SOLVER.ACCUMULATION_STEPS", 3)
EVERYTHING += (
    "SOLVER.CHECKPOINT_PERIOD",
    4,
    "TEST.EVAL_PERIOD",
    "1ep",
    "LOG.PERIOD",
    2,
    "LOG.WINDOW",
    5,
)
EVERYTHING += ("SOLVER.AMP.ENABLED", True, "SOLVER.AMP.PRECISION", "bfloat16", "HOOKS", HOOKS)
EVERYTHING += ("DATASETS.VAL", ("tiny_val",), "CHECKPOINT.BEST_METRIC", "classification/top1")
EVERYTHING += ("CHECKPOINT.MAX_TO_KEEP", 2, "CHECKPOINT.BEST_TO_KEEP", 2)
EVERYTHING += ("EARLY_STOPPING.METRIC", "classification/top1", "EARLY_STOPPING.PATIENCE", 2)

CLIP = ("SOLVER.CLIP_GRADIENTS.ENABLED", True, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "norm")

JOBS = {
    "everything": Configured(*EVERYTHING),
    "everything, asynchronous metrics": Configured(*EVERYTHING, "LOG.ASYNC", True),
    "workers": Configured("DATALOADER.NUM_WORKERS", 2, "LOG.PERIOD", 3),
    "fp16": Configured("SOLVER.AMP.ENABLED", True, *CLIP, "SOLVER.AMP.INIT_SCALE", 2.0**20),
    "schedules": Configured(
        "SOLVER.SCHEDULES", [{"NAME": "Cosine", "STEP_SIZE": "1ep"}], "SOLVER.MAX_ITER", "3ep"
    ),
    "student and teacher": Configured(
        "CHECKPOINT.ASYNC", True, "SOLVER.CHECKPOINT_PERIOD", 3, trainer_class=Student
    ),
    "gan": GAN(),
    "finite data": FiniteData(),
    "finite data, workers": FiniteData(num_workers=2, persistent_workers=True),
    "windows that cross epochs": FiniteData(accumulation_steps=3),
}


QUICK = ("everything", "student and teacher", "fp16")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in JOBS],
)
def test_a_run_that_is_killed_at_any_event_and_resumed_ends_as_the_whole_one(tmp_path, name):
    check(JOBS[name], tmp_path, num_kills=2 if "workers" in name else 4)


def test_a_state_that_is_not_saved_is_found(tmp_path):
    with pytest.raises(AssertionError, match="killed at event"):
        check(Forgetful(), tmp_path, num_kills=20)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_kills"), [("everything", 40), ("gan", None)])
def test_more_events_or_all(tmp_path, name, num_kills):
    check(JOBS[name], tmp_path, num_kills, seed=1)


SETTINGS = [
    [("SOLVER.ACCUMULATION_STEPS", 3, "SOLVER.IMS_PER_BATCH", 4), ("SOLVER.IMS_PER_BATCH", 7)],
    [
        ("SOLVER.AMP.ENABLED", True),
        ("SOLVER.AMP.ENABLED", True, "SOLVER.AMP.PRECISION", "bfloat16"),
    ],
    [CLIP, ("SOLVER.NON_FINITE.POLICY", "skip")],
    [("LOG.ASYNC", True, "LOG.PERIOD", 3), ("LOG.GATHER_PERIOD", 2)],
    [
        ("CHECKPOINT.ASYNC", True, "SOLVER.CHECKPOINT_PERIOD", 3),
        ("SOLVER.CHECKPOINT_PERIOD", "1ep"),
    ],
    [("TEST.EVAL_PERIOD", "1ep", "DATASETS.VAL", ("tiny_val",)), ("TEST.EVAL_PERIOD", 3)],
    [("CHECKPOINT.BEST_METRIC", "classification/top1"), EVERYTHING[-4:]],
    [("HOOKS", HOOKS[:1]), ("HOOKS", HOOKS[1:])],
    [
        ("SOLVER.OPTIMIZER.NAME", "AdamW", "SOLVER.BASE_LR", 0.01),
        ("SOLVER.SCHEDULES", [{"NAME": "Cosine"}]),
    ],
    [("DATALOADER.NUM_WORKERS", 1), ("SEED", -1)],
]


def fails(settings, folder):
    try:
        check(Configured(*(word for chosen in settings for word in chosen)), folder, num_kills=3)
    except AssertionError as error:
        return error
    return None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_settings_that_are_drawn_resume_exactly(tmp_path, seed):
    """A failure is shown with as few of the settings as it needs."""
    draw = random.Random(seed)
    settings = [draw.choice(choices) for choices in SETTINGS if draw.random() < 0.6]
    error = fails(settings, tmp_path / "all")
    for i in reversed(range(len(settings)) if error else []):
        fewer = settings[:i] + settings[i + 1 :]
        if smaller := fails(fewer, tmp_path / str(i)):
            settings, error = fewer, smaller
    assert error is None, f"{settings}: {error}"


TWO_RANKS = {
    "ddp": Configured("DATALOADER.NUM_WORKERS", 0, *CLIP),
    "fsdp": Configured("MODEL.PARALLEL", "fsdp", *CLIP),
    "logical ranks": Configured("SOLVER.LOGICAL_RANKS", 4),
}
OPTIONS = (
    "broadcast_buffers",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "fp16_compression",
)
THREE_RANKS = {"ddp": Buckets(), **{option: Buckets(**{option: True}) for option in OPTIONS}}


def check_all(rank, folder, jobs):
    for name, job in jobs.items():
        check(job, Path(folder) / name)
    return "same"


def two_ranks(rank, folder):
    return check_all(rank, folder, TWO_RANKS)


def three_ranks(rank, folder):
    return check_all(rank, folder, THREE_RANKS)


class Unsettled(SimpleTrainer):
    """A mistake: without the backward pass before the first step, DDP orders its buckets after it."""

    def run_step(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, "settle_buckets", lambda *args: None)
            super().run_step()


def unsettled(rank, folder):
    return check_all(rank, folder, {"unsettled": Buckets(Unsettled)})


@pytest.mark.slow
def test_ranks_that_are_killed_together_and_resumed_end_as_those_that_ran_through(tmp_path):
    assert on_two_ranks([two_ranks], tmp_path)["two_ranks"] == ["same"] * 2


@pytest.mark.slow
def test_three_ranks_add_up_gradients_in_the_same_order_in_a_resumed_run(tmp_path):
    found = on_two_ranks([three_ranks, unsettled], tmp_path, num_ranks=3)
    assert found["three_ranks"] == ["same"] * 3
    assert ["killed at event" in text for text in found["unsettled"]] == [True] * 3
