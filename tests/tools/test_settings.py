"""Hooks, and settings of the optimization, switched on by the config of a digits job.

Their effects must be absent without the options, and there in a run that consists of two ``train()`` calls, a save, a
load in a new trainer and a third call: such a run ends after 4, 8 and 12 iterations. An epoch is 3 iterations.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import default_collate

from projects.digits import DigitsCNN, DigitsTransform, load_split
from tests.tools.digits_hooks import first_scan
from tests.tools.digits_run import MAX_ITER, Run, evaluate, in_one_piece, in_pieces
from tests.utils.png import decode_png
from trainkit.checkpoint.format import make_format

LOSS = "loss/total_loss"  # an evaluation result
OURS = ["IMPORTS", ["projects.digits", "tests.tools.digits_hooks"]]
SMALL = [  # a tenth of the data in a tenth of the time
    *("DATALOADER.SAMPLER_TRAIN", "RandomSubsetTrainingSampler", "DATALOADER.RANDOM_SUBSET_RATIO", 0.1),
    *("SOLVER.IMS_PER_BATCH", 40, "TEST.EVALUATORS", ["LossEvaluator"], *OURS),
]
# a save before the last iteration
STEPS = [*SMALL, "SOLVER.CHECKPOINT_PERIOD", MAX_ITER - 1, "TEST.EVAL_PERIOD", 0, "MODEL.NAME", "DigitsThatReport"]


class Job(NamedTuple):
    options: list[Any]  # KEY, value, KEY, value, ... after those of digits_run.OPTIONS
    effects: dict[str, Callable[[Run], bool]]  # each is true with the options, and without them false or an error


def metric_at(name: str, *iterations: int) -> Callable[[Run], bool]:
    """The metric is written at these iterations and no others."""
    return lambda run: [*run.metric(name)] == [*iterations]


def metric_is(name: str, value: Callable[[int], Any]) -> Callable[[Run], bool]:
    """The metric is this function of the iteration."""
    return lambda run: run.metric(name) == {iter: pytest.approx(value(iter)) for iter in range(MAX_ITER)}


def has_files(*names: str) -> Callable[[Run], bool]:
    return lambda run: {*names} <= {*run.files}


def logs(text: str) -> Callable[[Run], bool]:
    return lambda run: text in run.log


def in_order(*names: str) -> Callable[[Run], bool]:
    """These hooks run in this order after a step."""
    return lambda run: [name for name in run.hooks_at("after_step") if name in names] == [*names]


def loss_of(weights: dict[str, Tensor], num_samples: int) -> Any:
    """The loss on the validation data, computed anew."""
    model = DigitsCNN(width=2).eval()
    model.load_state_dict(weights)
    batch = default_collate([DigitsTransform()(sample) for sample in load_split("val")[:num_samples]])
    with torch.no_grad():
        return pytest.approx(F.cross_entropy(model(batch), batch["label"], label_smoothing=0.1).item(), rel=1e-5)


# ---------------------------------------------------------------------------- hooks


def scans_are_drawn(run: Run) -> bool:
    """Of the second batch of each evaluation, and of the fourth."""
    drawn = [name for name in run.files if "iter0000012" in name]
    batch = default_collate([DigitsTransform()(sample) for sample in load_split("val")[100:]])
    model = DigitsCNN(width=2).eval()
    model.load_state_dict({k: v for k, v in run.checkpoint()["model"].items() if "spare" not in k})
    with torch.no_grad():
        expected = first_scan(batch, model(batch))
    image = torch.from_numpy(decode_png((run.folder / drawn[-1]).read_bytes()))
    torch.testing.assert_close(image.int(), expected.int(), rtol=0, atol=1)
    return drawn == [
        "pictures/test/digits_test_iter0000012_batch0001.png",
        "pictures/test/digits_test_iter0000012_batch0003.png",
        "pictures/val/digits_val_iter0000012_batch0001.png",
    ]


def first_layer_is_frozen(run: Run) -> bool:
    """In epochs 2 and 3."""
    weights = [run.checkpoint(f"model_{i:07d}")["model"]["layers.0.weight"] for i in (1, 2, 8, 9)]
    return [torch.equal(a, b) for a, b in pairwise(weights)] == [False, True, False]


def garbage_is_collected_at_epochs_only(run: Run) -> bool:
    # the hook that counts them runs before the collection
    collections = run.metric("collections")
    rises = [later for earlier, later in pairwise(collections) if collections[later] > collections[earlier]]
    others = [iter for iter in rises if iter not in (4, 8)]  # there, another call of train() starts
    return set(run.metric("collects_by_itself").values()) == {0} and others == [3, 6, 9]


def part_of_the_peak_is_stored(run: Run) -> bool:
    """Of the peak of 2e12 operations per second, by the 3e6 operations per sample."""
    per_sec = run.metric("samples_per_sec")
    return run.metric("mfu_pct") == {iter: pytest.approx(100 * 3e6 * per_sec[iter] / 2e12) for iter in (3, 7, 11)}


def average_moves(run: Run) -> bool:
    """By a tenth of the way towards the model, from the second epoch on; before, it is the model."""
    for iter, weight in {1: 1, 2: 1, 5: 0.1, 10: 0.1}.items():
        model = run.checkpoint(f"model_{iter:07d}")
        before = run.checkpoint(f"model_{iter - 1:07d}")["trainer"]["hooks"]["EMAHook"]["model"]
        now = model["trainer"]["hooks"]["EMAHook"]["model"]
        for key in (key for key in now if key.endswith((".weight", ".bias"))):
            torch.testing.assert_close(now[key], before[key].lerp(model["model"][key], weight), rtol=1e-6, atol=1e-6)
    return True


HOOKS = [
    {"NAME": "Probe", "FACTOR": 2.0, "PRIORITY": 40},
    {"NAME": "RuntimeInfo", "PERIOD": 1},
    {"NAME": "Throughput", "PERIOD": 4, "PEAK_TFLOPS": 2},
    {"NAME": "TorchProfiler", "ENABLE_PREDICATE": [1, 2], "SAVE_TENSORBOARD": False},
    {"NAME": "TorchMemoryStats", "PRIORITY": "HIGHEST"},
    {"NAME": "SyncBuffers"},
    {"NAME": "EmptyCache", "BEFORE_EPOCH": True, "AFTER_STEP": True},
    {"NAME": "GarbageCollection", "PERIOD": "1ep"},
    {"NAME": "UnusedParameters"},
    {"NAME": "Freeze", "NAMES": ["layers.0.*"], "BEGIN": "1ep", "END": "3ep"},
    {"NAME": "CheckFiniteLoss", "INTERVAL": 1},
    {"NAME": "VisualizationHook", "DRAW": "first_scan", "PERIOD": 2, "OUTPUT_DIR": "OUTPUT_DIR/pictures"},
    {"NAME": "ParamScheduler", "PARAM": "momentum", "SCHEDULES": [{"NAME": "Exponential", "GAMMA": 0.9}]},
]
AVERAGED = [{"NAME": "EMAHook", "DECAY": 0.9, "BEGIN": "1ep", "EVALUATE": "both"}, {"NAME": "SamplerSeed"}]
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
    "hooks": Job(
        [*SMALL, "MODEL.NAME", "DigitsWithSpare", "HOOKS", HOOKS, "SOLVER.CHECKPOINT_PERIOD", 1],
        {
            "a user's hook": metric_is("square", lambda iter: 2 * iter**2),
            "its place": in_order("TorchMemoryStats", "Probe", "LRScheduler", "PeriodicCheckpointer", "EvalHook"),
            "epochs": metric_is("epoch", lambda iter: iter // 3),
            "settings in the log": logs("40 samples per iteration; seed 0;"),
            "throughput": metric_at("samples_per_sec", 3, 7, 11),
            "peak": part_of_the_peak_is_stored,
            "profile": has_files("profile/trace_iter0000001.json"),
            "buffers": lambda run: "SyncBuffers" in run.hooks_at("before_eval"),
            "cache": lambda run: run.hooks_at("before_epoch") == ["EmptyCache"],
            "garbage": garbage_is_collected_at_epochs_only,
            "unused": logs(" spare.weight, spare.bias;"),
            "frozen": first_layer_is_frozen,
            "finite": lambda run: "CheckFiniteLoss" in run.hooks_at("after_backward"),
            "drawn": scans_are_drawn,
            "momentum": metric_is("momentum", lambda iter: 0.9 * 0.9**iter),
        },
    ),
    "averaged weights": Job(
        [*SMALL, "HOOKS", AVERAGED, "SOLVER.CHECKPOINT_PERIOD", 1, "CHECKPOINT.PUBLISH", "ema"],
        {
            "average": average_moves,
            "evaluated": lambda run: (
                run.metric(LOSS)[12] == loss_of(run.checkpoint()["trainer"]["hooks"]["EMAHook"]["model"], 200)
            ),
            "weights": lambda run: run.metric(f"raw/{LOSS}")[12] == loss_of(run.checkpoint()["model"], 200),
            "published": lambda run: any(name.startswith("model_final_published-") for name in run.files),
        },
    ),
    "changed default hooks": Job(
        [*SMALL, "HOOKS", CHANGED],
        {
            "evaluation": metric_at(LOSS, 3, 7, 11),
            "checkpoints": has_files("digits_0000005.pth", "digits_final.pth"),
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
            "nothing is saved": lambda run: not [name for name in run.files if "model_" in name],
            "timer": metric_at("time"),
        },
    ),
    # ------------------------------------------------------------------------ keys of evaluation and checkpoints
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
            "expected": logs("Results agree with TEST.EXPECTED_RESULTS"),
            "early": logs(f"{LOSS} has not been better"),
            "best": lambda run: len([name for name in run.files if name.startswith("model_best_0")]) == 2,
            "kept": lambda run: len([name for name in run.files if name.startswith("model_0")]) == 1,
            "console": logs("iterations  total_loss: "),
            "TensorBoard": lambda run: any("events.out.tfevents" in name for name in run.files),
            "published": lambda run: all(
                torch.equal(value, run.checkpoint()["model"][key])
                for name in [next(name for name in run.files if name.startswith("model_final_published-"))]
                for key, value in make_format("safetensors").read(run.folder / name)["model"].items()
            ),
        },
    ),
    # ------------------------------------------------------------------------ keys of the optimization
    "AdamW": Job(
        [
            *(*STEPS, "SOLVER.NESTEROV", False, "SOLVER.OPTIMIZER.NAME", "AdamW", "SOLVER.OPTIMIZER.AMSGRAD", True),
            *("SOLVER.OPTIMIZER.FUSED", False, "SOLVER.AMP.ENABLED", True, "SOLVER.AMP.PRECISION", "bfloat16"),
            *("SOLVER.PARAM_GROUPS.CUSTOM_KEYS", [{"KEY": "head", "EPS": 1e-3}], "SOLVER.REFERENCE_BATCH_SIZE", 80),
            *("SOLVER.ZERO_GRAD_BEFORE_FORWARD", True, "SOLVER.ACCUMULATION_STEPS", 2, "SOLVER.IMS_PER_BATCH", 20),
        ],
        {
            "options": lambda run: all(group["amsgrad"] and group["fused"] is False for group in run.param_groups()),
            "groups": lambda run: {group["eps"] for group in run.param_groups()} == {1e-8, 1e-3},
            "precision": metric_is("eps", lambda iter: 2.0**-7),
            "scale": lambda run: run.checkpoint()["trainer"]["_trainer"]["grad_scaler"].get("scale") is None,
            "types": lambda run: (
                run.checkpoint()["model"]["head.weight"].dtype == torch.float32
                and "max_exp_avg_sq" in run.optimizer_state()
            ),
            "gradients": lambda run: 0 <= run.metric("has_gradients")[0] < 1,
            "rate": lambda run: run.metric("lr")[11] < 0.06,
        },
    ),
    "float16 that overflows": Job(
        [
            *(*STEPS, "SOLVER.AMP.ENABLED", True, "SOLVER.AMP.INIT_SCALE", 2.0**100),
            *("SOLVER.CLIP_GRADIENTS.ENABLED", True, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "full_model"),
        ],
        {
            "precision": metric_is("eps", lambda iter: 2.0**-10),
            "scale": metric_is("[metric]grad_scaler", lambda iter: 2.0 ** (100 - iter)),
            "skipped": metric_is("skipped_updates", lambda iter: iter + 1),
        },
    ),
    "a schedule after another": Job(
        [
            *(*STEPS, "SOLVER.OPTIMIZER.NAME", "SignSGD", "SOLVER.NESTEROV", False, "SOLVER.MAX_BATCHES_PER_EPOCH", 2),
            "SOLVER.SCHEDULES",
            [
                {"NAME": "Linear", "END": 5, "START_FACTOR": 0.2},
                {"NAME": "Step", "BEGIN": 5, "STEP_SIZE": "1ep", "GAMMA": 0.5},
            ],
        ],
        {
            "rate": metric_is("lr", lambda t: 0.1 * (0.2 + 0.2 * t if t < 5 else 0.5 ** ((t - 5) // 2))),
            "a user's optimizer": lambda run: all(
                (run.checkpoint()["model"][key] - before).abs().max() == pytest.approx(0.1 * 0.5**3, rel=1e-3)
                for key, before in run.checkpoint(f"model_{MAX_ITER - 2:07d}")["model"].items()
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


def test_a_stream_without_epochs_is_trained(tmp_path):
    assert len(in_one_piece(tmp_path, *OURS, "DATASETS.TRAIN", ["digits_stream"]).metric("total_loss")) == MAX_ITER


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
