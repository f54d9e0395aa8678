"""The hooks, with the settings of the evaluation and the logs; those of averaging and checkpoints are taken in.

A run in pieces ends after 4, 8 and 12 iterations, where it saves and evaluates whatever the periods are. An
epoch is 3 iterations, so with a period of one epoch both kinds of runs do the same.
"""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import default_collate

from projects.digits import DigitsCNN, DigitsTransform, load_split
from tests.tools.digits_hooks import first_scan
from tests.tools.digits_run import Run
from tests.tools.settings import (
    LOSS,
    Setting,
    all_of,
    has_files,
    has_no_files,
    hook,
    in_order,
    logs,
    metric_among,
    metric_at,
    metric_is,
    no_metric,
)
from tests.tools.settings_of_averaging import AVERAGING, loss_of
from tests.tools.settings_of_checkpoints import CHECKPOINTS, MONITORING, PLATEAU
from tests.utils.png import decode_png

OURS = ["IMPORTS", ["projects.digits", "tests.tools.digits_hooks"]]
SMALL = [  # a tenth of the data in a tenth of the time
    *("DATALOADER.SAMPLER_TRAIN", "RandomSubsetTrainingSampler", "DATALOADER.RANDOM_SUBSET_RATIO", 0.1),
    *("SOLVER.IMS_PER_BATCH", 40, "TEST.EVALUATORS", ["LossEvaluator"]),
]
ALL_DATA = ["DATALOADER.RANDOM_SUBSET_RATIO", 1.0, "SOLVER.IMS_PER_BATCH", 400]
EACH = ["SOLVER.CHECKPOINT_PERIOD", 1]
PROBE = [*OURS, *hook("Probe")]


# ---------------------------------------------------------------------------- effects


def has_file_like(prefix: str) -> Callable[[Run], None]:
    def effect(run: Run) -> None:
        assert any(name.startswith(prefix) for name in run.files)

    return effect


def hooks_at(point: str, *names: str) -> Callable[[Run], None]:
    """These hooks and no others act at this point."""

    def effect(run: Run) -> None:
        assert run.hooks_at(point) == list(names)

    return effect


def _acts(run: Run, point: str, name: str) -> None:
    assert name in run.hooks_at(point)


def statistics_are_those_of_the_weights(run: Run) -> None:
    model = run.checkpoint()["model"]
    images = default_collate([DigitsTransform()(sample) for sample in load_split("train")])["image"]
    features = F.conv2d(images, model["layers.0.weight"], padding=1)
    # three batches of 400 are not exactly the 1,197 images
    torch.testing.assert_close(model["layers.1.running_mean"], features.mean([0, 2, 3]), rtol=0.01, atol=0)
    torch.testing.assert_close(model["layers.1.running_var"], features.var([0, 2, 3]), rtol=0.01, atol=0)


def scans_are_drawn(run: Run) -> None:
    """Of the second batch of each evaluation, and of the fourth."""
    drawn = [name for name in run.files if "iter0000012" in name]
    assert drawn == [
        "visualization/test/digits_test_iter0000012_batch0001.png",
        "visualization/test/digits_test_iter0000012_batch0003.png",
        "visualization/val/digits_val_iter0000012_batch0001.png",
    ]
    batch = default_collate([DigitsTransform()(sample) for sample in load_split("val")[100:]])
    model = DigitsCNN(width=2).eval()
    model.load_state_dict(run.checkpoint()["model"])
    with torch.no_grad():
        expected = first_scan(batch, model(batch))
    image = torch.from_numpy(decode_png((run.folder / drawn[-1]).read_bytes()))
    assert torch.equal(image[:8], expected[:8])
    torch.testing.assert_close(image[8].int(), expected[8].int(), rtol=0, atol=1)


def first_layer_is_frozen(run: Run) -> None:
    """In epochs 2 and 3."""
    weights = [run.checkpoint(f"model_{i:07d}")["model"]["layers.0.weight"] for i in (1, 2, 8, 9)]
    assert [torch.equal(a, b) for a, b in pairwise(weights)] == [False, True, False]


def garbage_is_collected_at_epochs_only(run: Run) -> None:
    assert set(run.metric("collects_by_itself").values()) == {0}
    # the hook that counts them runs before the collection
    collections = run.metric("collections")
    rises = [later for earlier, later in pairwise(collections) if collections[later] > collections[earlier]]
    assert [iter for iter in rises if iter not in (4, 8)] == [3, 6, 9]  # there, another call of train() starts


def part_of_the_peak_is_stored(run: Run) -> None:
    """Of the peak of 2e12 operations per second, by the 3e6 operations per sample."""
    per_sec = run.metric("samples_per_sec")
    assert run.metric("mfu_pct") == {iter: pytest.approx(100 * 3e6 * per_sec[iter] / 2e12) for iter in (3, 7, 11)}


def first_batch_is_evaluated(run: Run) -> None:
    assert run.metric(LOSS)[12] == loss_of(run.checkpoint()["model"], num_samples=100)


# ---------------------------------------------------------------------------- settings

EVALUATION = [
    Setting("evaluation period", ["TEST.EVAL_PERIOD", 5], metric_among(LOSS, 4, 9)),
    Setting("evaluation period in epochs", ["TEST.EVAL_PERIOD", "1ep"], metric_among(LOSS, 2, 5, 8)),
    Setting("evaluation at the start", ["TEST.EVAL_AT_START", True], metric_among(LOSS, 0)),
    Setting("batches that are evaluated", ["TEST.MAX_BATCHES", 1], first_batch_is_evaluated),
    Setting(
        "samples that are evaluated at once", ["TEST.IMS_PER_BATCH", 200], logs("inference of 1 batches of digits_val")
    ),
    Setting(
        "evaluators",
        ["TEST.EVALUATORS", ["ClassificationEvaluator"]],
        all_of(metric_among("classification/top1", 12), no_metric(LOSS)),
    ),
    Setting(
        "evaluation of the test data only",
        ["DATASETS.VAL", ()],
        all_of(no_metric(f"test/{LOSS}"), metric_among(LOSS, 12)),
    ),
    Setting(
        "expected results",
        ["TEST.EXPECTED_RESULTS", [["loss", "total_loss", 2, 2]]],
        logs("Results agree with TEST.EXPECTED_RESULTS"),
    ),
    Setting(
        "precise batch-norm statistics",
        ["TEST.PRECISE_BN.ENABLED", True, "TEST.PRECISE_BN.NUM_ITER", 3],
        all_of(statistics_are_those_of_the_weights, in_order("LRScheduler", "PreciseBN", "PeriodicCheckpointer")),
        ALL_DATA,
    ),
    Setting("EvalHook in HOOKS", hook("EvalHook", EVAL_AFTER_TRAIN=False), metric_at(LOSS, [3, 7, 11])),
    Setting(
        "EvalHook switched off",
        hook("EvalHook", ENABLED=False),
        all_of(no_metric(LOSS), metric_among(f"test/{LOSS}", 12)),
    ),
    Setting(
        "FinalEvalHook switched off",
        hook("FinalEvalHook", ENABLED=False),
        all_of(no_metric(f"test/{LOSS}"), metric_among(LOSS, 12)),
    ),
    Setting(
        "VisualizationHook",
        [*OURS, *hook("VisualizationHook", DRAW="first_scan", PERIOD=2)],
        scans_are_drawn,
    ),
    Setting(
        "VisualizationHook: folder",
        hook("VisualizationHook", DRAW="first_scan", PERIOD=2, OUTPUT_DIR="OUTPUT_DIR/pictures"),
        has_files("pictures/val/digits_val_iter0000012_batch0001.png"),
        [*OURS, *hook("VisualizationHook", DRAW="first_scan", PERIOD=2)],
    ),
]

LOGS = [
    Setting("log period", ["LOG.PERIOD", 4], metric_at("lr", [3, 7, 11])),
    Setting(
        "log window",
        ["LOG.WINDOW", 3],
        metric_is("square", {2: 1, 3: 4, 6: 25, 7: 36, 10: 81, 11: 100}),
        PROBE,
    ),
    Setting(
        "console",
        ["LOG.WRITERS", ["console"]],
        all_of(logs("after 12 of 12 iterations  total_loss: "), has_no_files("metrics.json")),
    ),
    Setting(
        "TensorBoard",
        ["LOG.WRITERS", ["tensorboard"]],
        has_file_like("events.out.tfevents."),
    ),
    Setting("gather period", ["LOG.GATHER_PERIOD", 4], metric_at("total_loss", [3, 7, 11])),
    Setting("PeriodicWriter in HOOKS", hook("PeriodicWriter", PERIOD=4), metric_at("lr", [3, 7, 11])),
    Setting("PeriodicWriter switched off", hook("PeriodicWriter", ENABLED=False), has_no_files("metrics.json")),
    Setting("LRScheduler switched off", hook("LRScheduler", ENABLED=False), no_metric("lr")),
    Setting("IterationTimer: warm-up", hook("IterationTimer", WARMUP_ITER=0), metric_at("time", [*range(12)])),
    Setting("IterationTimer switched off", hook("IterationTimer", ENABLED=False), no_metric("time")),
    Setting(
        "RuntimeInfo",
        hook("RuntimeInfo", PERIOD=1),
        all_of(
            metric_is("epoch", {0: 0, 2: 0, 3: 1, 5: 1, 11: 3}),
            logs("40 samples per iteration; seed 0; 944 of 944"),
        ),
    ),
    Setting(
        "Throughput",
        hook("Throughput", PERIOD=4),
        metric_at("samples_per_sec", [3, 7, 11]),
    ),
    Setting(
        "Throughput: part of the peak",
        [*OURS, "MODEL.NAME", "DigitsWithFlops", *hook("Throughput", PERIOD=4, PEAK_TFLOPS=2)],
        part_of_the_peak_is_stored,
    ),
    Setting(
        "TorchProfiler",
        hook("TorchProfiler", ENABLE_PREDICATE=[1, 2], SAVE_TENSORBOARD=False),
        has_files("profile/trace_iter0000001.json"),
    ),
    Setting(
        "TorchMemoryStats",
        hook("TorchMemoryStats"),
        in_order("LRScheduler", "TorchMemoryStats", "PeriodicCheckpointer"),
    ),
    Setting("MemorySnapshot", hook("MemorySnapshot"), lambda run: _acts(run, "before_train", "MemorySnapshot")),
]

OTHERS = [
    Setting(
        "SyncBuffers",
        ["HOOKS", [{"NAME": "SyncBuffers"}, {"NAME": "Probe"}]],
        all_of(in_order("Probe", "SyncBuffers", "PeriodicCheckpointer"), hooks_at("before_eval", "SyncBuffers")),
        PROBE,
    ),
    Setting("EmptyCache", hook("EmptyCache"), hooks_at("after_epoch", "EmptyCache")),
    Setting(
        "EmptyCache: after each step",
        hook("EmptyCache", BEFORE_EPOCH=True, AFTER_STEP=True, AFTER_EPOCH=False),
        all_of(
            in_order("EvalHook", "EmptyCache", "PeriodicWriter"),
            hooks_at("before_epoch", "EmptyCache"),
            hooks_at("after_epoch", ""),
        ),
        hook("EmptyCache"),
    ),
    Setting(
        "SamplerSeed",
        hook("SamplerSeed"),
        metric_is("epoch_of_data", {0: 0, 3: 1, 6: 2, 9: 3}),
        [
            *OURS,
            "DATASETS.TRAIN",
            ["digits_by_epoch"],
            "INPUT.TRAIN_TRANSFORM",
            "",
            *hook("SamplerSeed", ENABLED=False),
        ],
    ),
    Setting(
        "GarbageCollection",
        ["HOOKS", [{"NAME": "Probe"}, {"NAME": "GarbageCollection", "PERIOD": "1ep"}]],
        all_of(garbage_is_collected_at_epochs_only, in_order("EvalHook", "GarbageCollection", "PeriodicWriter")),
        PROBE,
    ),
    Setting(
        "UnusedParameters",
        hook("UnusedParameters"),
        logs("never used in the forward pass: spare.weight, spare.bias;"),
        [*OURS, "MODEL.NAME", "DigitsWithSpare"],
    ),
    Setting("Freeze", hook("Freeze", NAMES=["layers.0.*"], BEGIN="1ep", END="3ep"), first_layer_is_frozen, EACH),
    Setting("CheckFiniteLoss", hook("CheckFiniteLoss", INTERVAL=1), hooks_at("after_backward", "CheckFiniteLoss")),
    Setting(
        "hook of a user",
        [*OURS, *hook("Probe", FACTOR=2.0)],
        all_of(
            metric_is("square", {1: 2, 5: 50, 11: 242}),
            in_order("LRScheduler", "Probe", "PeriodicCheckpointer"),
        ),
    ),
    *(
        Setting(f"hook with {place} {value}", hook("Probe", **{place: value}), in_order(*order), PROBE)
        for place, value, order in (
            ("PRIORITY", "HIGHEST", ("IterationTimer", "Probe", "LRScheduler")),
            ("PRIORITY", 60, ("EvalHook", "Probe", "PeriodicWriter")),
        )
    ),
]

HOOKS = [
    setting._replace(base=[*SMALL, *setting.base])
    for setting in (*AVERAGING, *PLATEAU, *MONITORING, *CHECKPOINTS, *EVALUATION, *LOGS, *OTHERS)
]
