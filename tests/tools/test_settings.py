"""Hooks and evaluations, switched on by the config of a digits job.

Their effects must be absent without the options, and there in a run that consists of two ``train()`` calls, a save, a
load in a new trainer and a third call: such a run ends after 4, 8 and 12 iterations. An epoch is 3 iterations.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import default_collate

from projects.digits import DigitsCNN, DigitsTransform, load_split
from tests.tools.digits_run import MAX_ITER, Run, evaluate, in_one_piece, in_pieces
from trainkit.checkpoint.format import make_format
from trainkit.engine import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY

LOSS = "loss/total_loss"  # an evaluation result
SMALL = [  # a tenth of the data in a tenth of the time
    *("DATALOADER.SAMPLER_TRAIN", "RandomSubsetTrainingSampler", "DATALOADER.RANDOM_SUBSET_RATIO", 0.1),
    *("SOLVER.IMS_PER_BATCH", 40, "TEST.EVALUATORS", ["LossEvaluator"]),
]


@HOOK_REGISTRY.register()
class Probe(HookBase):
    """Store the ``square`` of the iteration."""

    def __init__(self, factor: float = 1.0) -> None:
        self._factor = factor

    def after_step(self) -> None:
        self.trainer.storage.put_scalar("square", self._factor * self.trainer.iter**2)


class Job(NamedTuple):
    options: list[Any]  # KEY, value, KEY, value, ... after those of digits_run.OPTIONS
    effects: dict[str, Callable[[Run], bool]]  # each is true with the options, and without them false or an error


def metric_at(name: str, *iterations: int) -> Callable[[Run], bool]:
    """The metric is written at these iterations and no others."""
    return lambda run: [*run.metric(name)] == [*iterations]


def metric_is(name: str, value: Callable[[int], Any]) -> Callable[[Run], bool]:
    """The metric is this function of the iteration."""
    return lambda run: run.metric(name) == {iter: pytest.approx(value(iter)) for iter in range(MAX_ITER)}


def files(run: Run, start: str) -> list[str]:
    return [name for name in run.files if name.startswith(start)]


def loss_of(weights: dict[str, Tensor], num_samples: int) -> Any:
    """The loss on the validation data, computed anew."""
    model = DigitsCNN(width=2).eval()
    model.load_state_dict(weights)
    batch = default_collate([DigitsTransform()(sample) for sample in load_split("val")[:num_samples]])
    with torch.no_grad():
        return pytest.approx(F.cross_entropy(model(batch), batch["label"], label_smoothing=0.1).item(), rel=1e-5)


AVERAGED = [{"NAME": "EMAHook", "DECAY": 0.9, "BEGIN": "1ep", "EVALUATE": "both"}]
AVERAGED += [{"NAME": "Probe", "FACTOR": 2.0}]
SCHEDULES = [{"NAME": "Linear", "END": 5, "START_FACTOR": 0.2}]
SCHEDULES += [{"NAME": "Step", "BEGIN": 5, "STEP_SIZE": "1ep", "GAMMA": 0.5}]
CHANGED = [
    {"NAME": "EvalHook", "EVAL_AFTER_TRAIN": False},
    {"NAME": "PeriodicCheckpointer", "PERIOD": "2ep", "FILE_PREFIX": "digits"},
    {"NAME": "PeriodicWriter", "PERIOD": 4},
    {"NAME": "IterationTimer", "WARMUP_ITER": 0},
    {"NAME": "BestCheckpointer", "VAL_METRIC": LOSS, "MODE": "max", "FILE_PREFIX": "model_worst"},
    {"NAME": "FinalEvalHook", "ENABLED": False},
    {"NAME": "LRScheduler", "ENABLED": False},
]
DISABLED = ["EvalHook", "PeriodicCheckpointer", "IterationTimer", "BestCheckpointer", "EarlyStopping", "PublishWeights"]

JOBS = {
    "hooks of one's own and averaged weights": Job(
        [*SMALL, "HOOKS", AVERAGED, "CHECKPOINT.PUBLISH", "ema", "SOLVER.SCHEDULES", SCHEDULES],
        {
            "a user's hook": metric_is("square", lambda iter: 2 * iter**2),
            "rate": metric_is("lr", lambda t: 0.1 * (0.2 + 0.2 * t if t < 5 else 0.5 ** ((t - 5) // 3))),
            "average": lambda run: (
                run.metric(LOSS)[12] == loss_of(run.checkpoint()["trainer"]["hooks"]["EMAHook"]["model"], 200)
            ),
            "weights": lambda run: run.metric(f"raw/{LOSS}")[12] == loss_of(run.checkpoint()["model"], 200),
            "published": lambda run: len(files(run, "model_final_published-")) == 1,
        },
    ),
    "changed default hooks": Job(
        [*SMALL, "HOOKS", CHANGED],
        {
            "evaluation": metric_at(LOSS, 3, 7, 11),
            "checkpoints": lambda run: {"digits_0000005.pth", "digits_final.pth"} <= {*run.files},
            "writer": metric_at("total_loss", 3, 7, 11),
            "timer": metric_at("time", 3, 7, 11),
            "best": lambda run: run.checkpoint("model_worst")["iteration"] == 3,
            "final": metric_at(f"test/{LOSS}"),
            "schedule": metric_at("lr"),
        },
    ),
    "disabled hooks": Job(
        [
            *(*SMALL, "HOOKS", [{"NAME": name, "ENABLED": False} for name in DISABLED], "CHECKPOINT.PUBLISH", "model"),
            *("CHECKPOINT.BEST_METRIC", LOSS, "EARLY_STOPPING.METRIC", LOSS, "EARLY_STOPPING.MIN_DELTA", 9.0),
        ],
        {
            "nothing is evaluated but the test data": lambda run: (
                not run.metric(LOSS) and [*run.metric(f"test/{LOSS}")] == [12]
            ),
            "nothing is saved": lambda run: not files(run, "model_"),
            "timer": metric_at("time"),
        },
    ),
    "evaluation": Job(
        [
            *(*SMALL, "TEST.EVAL_PERIOD", "1ep", "TEST.EVAL_AT_START", True),
            *("TEST.MAX_BATCHES", 1, "TEST.EXPECTED_RESULTS", [["loss", "total_loss", 2, 2]]),
            *("CHECKPOINT.BEST_METRIC", LOSS, "CHECKPOINT.BEST_TO_KEEP", 2, "CHECKPOINT.BEST_MODE", "max"),
            *("EARLY_STOPPING.METRIC", LOSS, "EARLY_STOPPING.MODE", "max", "EARLY_STOPPING.PATIENCE", 2),
            *("LOG.WRITERS", ["console", "json", "tensorboard"], "CHECKPOINT.PUBLISH", "model"),
            *("CHECKPOINT.PUBLISH_FORMAT", "safetensors", "CHECKPOINT.MAX_TO_KEEP", 1, "CHECKPOINT.START", 1),
        ],
        {
            "period, start and stop": metric_at(LOSS, 0, 2, 4, 5, 8),
            "batches": lambda run: run.metric(LOSS)[8] == loss_of(run.checkpoint()["model"], 100),
            "expected": lambda run: "Results agree with TEST.EXPECTED_RESULTS" in run.log,
            "early": lambda run: f"{LOSS} has not been better" in run.log,
            "best": lambda run: len(files(run, "model_best_0")) == 2,
            "kept": lambda run: len(files(run, "model_0")) == 1,
            "console": lambda run: "iterations  total_loss: " in run.log,
            "TensorBoard": lambda run: any("events.out.tfevents" in name for name in run.files),
            "published": lambda run: all(
                torch.equal(value, run.checkpoint()["model"][key])
                for name in [files(run, "model_final_published-")[0]]
                for key, value in make_format("safetensors").read(run.folder / name)["model"].items()
            ),
        },
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run without any of these options."""
    return in_one_piece(tmp_path_factory.mktemp("plain"), *SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_settings_survive_two_calls_of_train_and_a_resume_and_are_absent_without_their_options(name, plain, tmp_path):
    run = in_pieces(tmp_path, *JOBS[name].options)

    assert [effect for effect, holds in JOBS[name].effects.items() if not holds(run)] == []
    assert [effect for effect, holds in JOBS[name].effects.items() if is_seen(holds, plain)] == []


def is_seen(holds, run):
    try:
        return holds(run)
    except (AssertionError, KeyError, FileNotFoundError, IndexError, StopIteration):
        return False


def test_eval_only_gives_the_results_of_the_end_of_training_for_both_weights(tmp_path):
    def evaluated(how, *options):
        hooks = [{"NAME": "EMAHook", "DECAY": 0.9, "EVALUATE": how}] if how else []
        return evaluate(tmp_path, *SMALL, "HOOKS", hooks, *options)

    run = in_one_piece(tmp_path, *SMALL, "HOOKS", [{"NAME": "EMAHook", "DECAY": 0.9, "EVALUATE": "both"}])
    names = "total_loss", "loss_cls"
    averaged = {name: run.metric(f"test/loss/{name}")[12] for name in names}
    raw = {name: run.metric(f"test/raw/loss/{name}")[12] for name in names}
    assert averaged != raw
    assert evaluated("both") == {"loss": averaged, "raw": {"loss": raw}}
    assert evaluated("ema", "MODEL.WEIGHTS", tmp_path / "model_final.pth") == {"loss": averaged}
    assert evaluated("raw") == evaluated("") == {"loss": raw}
