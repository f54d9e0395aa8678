"""A run of everything at once that is broken off anywhere and resumed ends as one that ran through."""

import json
import shutil
from contextlib import suppress

import pytest
import torch

from tests.engine.job import TinyClassifier, tiny_cfg
from tests.engine.tiny import CLOCK_READINGS
from trainkit.engine import DefaultTrainer, HookBase
from trainkit.modeling import MODEL_REGISTRY
from trainkit.utils.env import seed_all_rng


@MODEL_REGISTRY.register()
class LazyClassifier(TinyClassifier):
    """Makes a buffer in its first forward pass, of which everything later depends."""

    def forward(self, batch):
        if not hasattr(self, "shift"):
            self.register_buffer("shift", torch.rand(4) + batch["x"].mean(0))
        return super().forward({**batch, "x": batch["x"] + self.shift})


HOOKS = [
    {"NAME": "EMAHook", "DECAY": 0.9, "EVALUATE": "both"},
    {"NAME": "ReduceOnPlateau", "VAL_METRIC": "classification/top1", "PATIENCE": 0, "FACTOR": 0.5},
    {"NAME": "ParamScheduler", "PARAM": "momentum", "SCHEDULES": [{"NAME": "Linear", "START_FACTOR": 0.5}]},
]
# periods without a common divisor; 40 samples in epochs of 5 iterations of 2 times 4
OPTIONS = ("SOLVER.MAX_ITER", 13, "SOLVER.IMS_PER_BATCH", 4, "SOLVER.ACCUMULATION_STEPS", 2)
OPTIONS += ("SOLVER.CHECKPOINT_PERIOD", 4, "TEST.EVAL_PERIOD", 3, "LOG.PERIOD", 2, "LOG.WINDOW", 5)
OPTIONS += ("SOLVER.AMP.ENABLED", True, "SOLVER.AMP.PRECISION", "bfloat16", "HOOKS", HOOKS)
OPTIONS += ("DATASETS.VAL", ("tiny_val",), "CHECKPOINT.BEST_METRIC", "classification/top1", "CHECKPOINT.MAX_TO_KEEP", 2)
OPTIONS += ("EARLY_STOPPING.METRIC", "classification/top1", "EARLY_STOPPING.PATIENCE", 2, "CHECKPOINT.ASYNC", True)


class Killed(BaseException):
    """Nothing in between catches it."""


class Killer(HookBase):
    """Breaks the run off at one point of one iteration; the second of two objects stands behind all other hooks."""

    def __init__(self, point, iter):
        def kill(*arguments):
            if self.trainer.iter == iter:
                raise Killed

        setattr(self, point, kill)


def run(folder, seed, killer=None, *options, last=False):
    cfg = tiny_cfg(folder, *OPTIONS, *options)
    seed_all_rng(seed)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load()
    trainer.register_hooks([killer], priority="LOWEST" if last else "HIGHEST")
    trainer.train()
    return trainer


def content(folder):
    """What a run leaves: path -> value of each checkpoint, lines of metrics.json; clock readings aside."""
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    lines = [{name: value for name, value in line.items() if name not in CLOCK_READINGS} for line in lines]
    files = {path.name: flat(torch.load(path)) for path in sorted(folder.glob("*.pth"))}
    return files, [line for line in lines if line.keys() - {"iteration", "epoch"}]


# a clock reading takes more or fewer digits in metrics.json; HOOKS among the settings may name one that sends signals
LEFT_OUT = {*CLOCK_READINGS, "length", "sizes", "id", "HOOKS"}


def flat(value, path=""):
    if isinstance(value, dict):
        kept = {name: item for name, item in value.items() if name not in LEFT_OUT}
        return {k: v for name, item in kept.items() for k, v in flat(item, f"{path}/{name}").items()}
    if isinstance(value, list | tuple):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{path}/{i}").items()}
    if isinstance(value, torch.Tensor):
        return {path: (value.dtype, tuple(value.shape), value.numpy().tobytes())}
    return {path: repr(value)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    trainer = run(folder, seed=1)
    return content(folder), trainer.iter


PLACES = [("before_step", True), ("after_backward", False), ("after_step", False), ("after_step", True)]
PLACES += [("before_eval_step", False), ("after_eval", True), ("before_save", False), ("after_epoch", True)]


@pytest.mark.parametrize("iter", [2, 5, 8, 12])
@pytest.mark.parametrize(("point", "last"), PLACES)
def test_a_run_that_is_broken_off_ends_as_the_whole_one(whole, tmp_path, point, last, iter):
    try:
        run(tmp_path, 1, Killer(point, iter), last=last)
    except Killed:
        if not list(tmp_path.glob("*.pth")):  # nothing to resume from: the new run begins anew
            shutil.rmtree(tmp_path)
            run(tmp_path, 1)
        else:
            run(tmp_path, 2)
    assert content(tmp_path) == whole[0]


def test_a_run_that_is_broken_off_in_every_iteration_ends_as_the_whole_one(whole, tmp_path):
    for attempt in range(5, 13):
        try:
            run(tmp_path, attempt if attempt > 5 else 1, Killer("after_step", attempt), last=True)
        except Killed:
            continue
    run(tmp_path, 99)
    assert content(tmp_path) == whole[0]


def test_a_buffer_of_the_first_forward_pass_is_resumed_exactly(tmp_path):
    options = ("MODEL.NAME", "LazyClassifier")
    run(tmp_path / "whole", 1, None, *options)
    with suppress(Killed):
        run(tmp_path / "broken", 1, Killer("after_step", 5), *options)
    run(tmp_path / "broken", 2, None, *options)
    assert content(tmp_path / "broken") == content(tmp_path / "whole")


def test_a_run_of_another_seed_is_another_one(whole, tmp_path):
    run(tmp_path, 1, None, "SEED", 7)
    assert content(tmp_path)[1] != whole[0][1]
