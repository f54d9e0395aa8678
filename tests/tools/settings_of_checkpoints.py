"""Checkpoints, and what else follows from an evaluation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.tools.digits_run import Run
from tests.tools.settings import (
    LOSS,
    Setting,
    all_of,
    has_files,
    has_no_files,
    hook,
    logs,
    metric_among,
    metric_is,
)
from tests.tools.settings_of_averaging import average
from trainkit.checkpoint.format import make_format

SAVE_FIFTH = ["SOLVER.CHECKPOINT_PERIOD", 5]
EVERY_EPOCH = ["TEST.EVAL_PERIOD", "1ep"]
BEST = [*EVERY_EPOCH, "CHECKPOINT.BEST_METRIC", LOSS]
STOP = [*EVERY_EPOCH, "EARLY_STOPPING.METRIC", LOSS, "EARLY_STOPPING.PATIENCE", 2]


def numbered_files_are(*iterations: int) -> Callable[[Run], None]:
    """The checkpoints besides ``model_final``."""

    def effect(run: Run) -> None:
        assert [name for name in run.files if name.startswith("model_0")] == [f"model_{i:07d}.pth" for i in iterations]

    return effect


def logs_no(text: str) -> Callable[[Run], None]:
    def effect(run: Run) -> None:
        assert text not in run.log

    return effect


def published(
    weights: Callable[[Run], dict[str, Tensor]], name: str = "model_final", suffix: str = "pth"
) -> Callable[[Run], None]:
    """There is one published file of this checkpoint, and it holds these weights and nothing else."""

    def effect(run: Run) -> None:
        files = [file for file in run.files if file.startswith(f"{name}_published-")]
        assert len(files) == 1
        assert files[0].endswith(f".{suffix}")
        state = make_format("" if suffix == "pth" else suffix).read(run.folder / files[0])
        assert {*state} == {"model"}
        assert all(torch.equal(state["model"][key], value) for key, value in weights(run).items())

    return effect


def nothing_is_published(run: Run) -> None:
    assert [name for name in run.files if "published" in name] == []


def best_is(iteration: int, name: str = "model_best") -> Callable[[Run], None]:
    """The best checkpoint has been written after this iteration."""

    def effect(run: Run) -> None:
        assert run.checkpoint(name)["iteration"] == iteration

    return effect


def plateau(**arguments: Any) -> list[Any]:
    """No evaluation but the first is good enough: those after iterations 5 and 8 are not."""
    return hook("ReduceOnPlateau", VAL_METRIC=LOSS, MODE="min", FACTOR=0.5, THRESHOLD=0.99, **arguments)


PLATEAU = [
    Setting("ReduceOnPlateau", plateau(PATIENCE=0), metric_is("lr", {5: 0.1, 6: 0.05, 8: 0.05, 9: 0.025}), EVERY_EPOCH),
    *(
        Setting(f"ReduceOnPlateau: {name}", plateau(**arguments), effect, [*EVERY_EPOCH, *plateau(PATIENCE=0)])
        for name, arguments, effect in (
            ("patience", {"PATIENCE": 1}, metric_is("lr", {8: 0.1, 9: 0.05})),
            ("cooldown", {"PATIENCE": 0, "COOLDOWN": 1}, metric_is("lr", {6: 0.05, 11: 0.05})),
            ("least factor", {"PATIENCE": 0, "MIN_FACTOR": 0.4}, metric_is("lr", {6: 0.05, 9: 0.04})),
        )
    ),
]

MONITORING = [
    Setting(
        "EarlyStopping",
        ["EARLY_STOPPING.METRIC", LOSS, "EARLY_STOPPING.MODE", "max", "EARLY_STOPPING.PATIENCE", 2],
        logs("Stopped after 9 of 12 iterations: loss/total_loss has not been better"),
        EVERY_EPOCH,
    ),
    Setting(
        "EarlyStopping: patience",
        ["EARLY_STOPPING.PATIENCE", 1],
        logs("in 1 evaluations"),
        [*STOP, "EARLY_STOPPING.MODE", "max"],
    ),
    Setting("EarlyStopping: mode", ["EARLY_STOPPING.MODE", "max"], logs("Stopped after 9 of 12 iterations"), STOP),
    Setting("EarlyStopping: least improvement", ["EARLY_STOPPING.MIN_DELTA", 9.0], logs("Stopped after 9 of 12"), STOP),
    Setting("EarlyStopping: threshold", ["EARLY_STOPPING.THRESHOLD", 9.0], logs("better than the threshold 9.0"), STOP),
    Setting(
        "EarlyStopping in HOOKS",
        hook("EarlyStopping", VAL_METRIC=LOSS, MODE="max", PATIENCE=2),
        logs("Stopped after 9 of 12 iterations"),
        EVERY_EPOCH,
    ),
    Setting(
        "EarlyStopping switched off",
        hook("EarlyStopping", ENABLED=False),
        all_of(logs_no("Stopped after"), metric_among("lr", 11)),
        [*STOP, "EARLY_STOPPING.MIN_DELTA", 9.0],
    ),
    Setting("best checkpoint", ["CHECKPOINT.BEST_METRIC", LOSS], best_is(11), EVERY_EPOCH),
    Setting(
        "best checkpoints by two metrics",
        ["CHECKPOINT.BEST_METRIC", [LOSS, "loss/loss_cls"]],
        has_files("model_best_loss_total_loss.pth", "model_best_loss_loss_cls.pth"),
        BEST,
    ),
    Setting(
        "several best checkpoints",
        ["CHECKPOINT.BEST_TO_KEEP", 2],
        all_of(best_is(11), has_files("model_best_0000008.pth", "model_best_0000011.pth"), has_no_files("0000005.pth")),
        BEST,
    ),
    Setting("best checkpoint: mode", ["CHECKPOINT.BEST_MODE", "max"], best_is(2), BEST),
    Setting(
        "BestCheckpointer in HOOKS",
        hook("BestCheckpointer", VAL_METRIC=LOSS, MODE="max", FILE_PREFIX="model_worst"),
        all_of(best_is(2, "model_worst"), best_is(11)),
        BEST,
    ),
    Setting(
        "BestCheckpointer switched off",
        hook("BestCheckpointer", ENABLED=False),
        all_of(has_no_files("best.pth"), metric_among(LOSS, 2, 5, 8)),
        BEST,
    ),
]

CHECKPOINTS = [
    Setting("checkpoint period", ["SOLVER.CHECKPOINT_PERIOD", 5], numbered_files_are(4, 9)),
    Setting("checkpoint period in epochs", ["SOLVER.CHECKPOINT_PERIOD", "1ep"], numbered_files_are(2, 5, 8)),
    Setting("first checkpoint", ["CHECKPOINT.START", 1], numbered_files_are(0, 5, 10), SAVE_FIFTH),
    Setting("no last checkpoint", ["CHECKPOINT.SAVE_LAST", False], has_no_files("model_final.pth"), SAVE_FIFTH),
    Setting("checkpoints to keep", ["CHECKPOINT.MAX_TO_KEEP", 1], numbered_files_are(9), SAVE_FIFTH),
    Setting(
        "folder of the checkpoints",
        ["CHECKPOINT.DIR", "OUTPUT_DIR/elsewhere"],
        has_files("elsewhere/model_final.pth", "elsewhere/last_checkpoint", "metrics.json"),
    ),
    Setting(
        "PeriodicCheckpointer in HOOKS",
        hook("PeriodicCheckpointer", PERIOD="2ep", FILE_PREFIX="digits"),
        has_files("digits_0000005.pth", "digits_final.pth"),
    ),
    Setting(
        "PeriodicCheckpointer switched off",
        hook("PeriodicCheckpointer", ENABLED=False),
        all_of(has_no_files(".pth"), metric_among("lr", 11)),
    ),
    Setting("published weights", ["CHECKPOINT.PUBLISH", "model"], published(lambda run: run.checkpoint()["model"])),
    Setting(
        "published weights of the best checkpoint",
        ["CHECKPOINT.PUBLISH", "model"],
        published(lambda run: run.checkpoint("model_best")["model"], "model_best"),
        BEST,
    ),
    Setting(
        "published averaged weights",
        ["CHECKPOINT.PUBLISH", "ema"],
        published(average),
        [*hook("EMAHook", DECAY=0.5), "CHECKPOINT.PUBLISH", "model"],
    ),
    Setting(
        "published safetensors",
        ["CHECKPOINT.PUBLISH", "model", "CHECKPOINT.PUBLISH_FORMAT", "safetensors"],
        published(lambda run: run.checkpoint()["model"], suffix="safetensors"),
        ["CHECKPOINT.PUBLISH", "model"],
    ),
    Setting("PublishWeights in HOOKS", hook("PublishWeights"), published(lambda run: run.checkpoint()["model"])),
    Setting(
        "PublishWeights switched off",
        hook("PublishWeights", ENABLED=False),
        nothing_is_published,
        ["CHECKPOINT.PUBLISH", "model"],
    ),
]
