"""The checkpoints of the best values, with and without asynchronous saves, and published weights."""

import hashlib
import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from trainkit.projects.hooks.publish_weights import publish_weights

from tests.checkpoint.conftest import Counter, linear
from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep, Steps
from tests.two_ranks import on_two_ranks
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint.file import read_file, write_file
from trainkit.engine import DefaultPredictor, DefaultTrainer
from trainkit.engine.hooks import (
    BestCheckpointer,
    BestCheckpoints,
    EvalHook,
    PeriodicCheckpointer,
    PublishWeights,
)


def run_of_best(folder, values, save_format="", mode="max"):
    """Evaluations after each iteration, two of which are kept."""
    trainer, results = Steps(), iter(values)
    checkpointer = Checkpointer(nn.Linear(1, 1), folder, format=save_format, trainer=trainer)
    best = BestCheckpoints(1, checkpointer, "top1", mode, num_to_keep=2)
    trainer.register_hooks(
        [EvalHook(1, lambda: {"top1": next(results)}), best, PeriodicCheckpointer(checkpointer, 3)]
    )
    return trainer, checkpointer


def files_of_best(folder):
    """suffix of each best file -> its iteration."""
    found = sorted(path for path in folder.glob("model_best*.pth") if path.is_file())
    return {path.stem.removeprefix("model_best"): read_file(path)["iteration"] for path in found}


@pytest.mark.parametrize(
    ("values", "mode", "kept", "best", "save_format"),
    [
        ([50.0, 70.0, 60.0, 80.0, 65.0], "max", [1, 3], 3, "async_save"),
        ([3.0, 3.0, 3.0, 2.0, 2.0, 2.0], "min", [3, 4], 3, ""),  # of equal values the earlier ones
        ([math.nan, 50.0, math.inf, 40.0, math.nan, 30.0], "max", [1, 3], 1, ""),
    ],
)
def test_the_best_k_files_are_kept_and_others_removed(
    tmp_path, values, mode, kept, best, save_format
):
    trainer, checkpointer = run_of_best(tmp_path, values, save_format, mode)
    trainer.train(0, len(values))
    checkpointer.wait()
    assert files_of_best(tmp_path) == {"": best} | {
        f"_{iteration:07d}": iteration for iteration in kept
    }
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"


def _a_file_fails_on_rank_0(rank, folder):
    """Of two files, rank 0 cannot write the first; both ranks save the second, and know that it does not count."""
    trainer, folder = Steps(), Path(folder, str(rank))
    if rank == 0:
        (folder / "model_best_0000003.pth").mkdir(parents=True)
    results = iter([1.0, 3.0, 2.0])
    evaluate = EvalHook(2, lambda: {"top1": next(results)} if rank == 0 else None)
    checkpointer = Checkpointer(nn.Linear(1, 1), folder, trainer=trainer)
    trainer.register_hooks([evaluate, BestCheckpoints(2, checkpointer, "top1", num_to_keep=2)])
    trainer.train(0, 6)
    return trainer.state_dict()["hooks"]["BestCheckpoints"]["kept"]


@pytest.mark.slow
def test_all_ranks_know_that_a_file_of_rank_0_is_not_there(tmp_path):
    kept = [["model_best_0000005", 2.0], ["model_best_0000001", 1.0]]
    assert on_two_ranks([_a_file_fails_on_rank_0], tmp_path) == {
        "_a_file_fails_on_rank_0": [kept, []]
    }


def test_a_config_makes_one_hook_for_each_metric(tmp_path):
    best = ("CHECKPOINT.BEST_METRIC", ["classification/top1", "classification/mean_class_accuracy"])
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *best, "CHECKPOINT.BEST_TO_KEEP", 2))
    hooks = [
        (type(hook), hook.file_prefix)
        for hook in trainer.hooks
        if isinstance(hook, BestCheckpointer)
    ]
    names = ["model_best_classification_top1", "model_best_classification_mean_class_accuracy"]
    assert hooks == [(BestCheckpoints, name) for name in names]


def values_of(path):
    state = read_file(path)
    assert list(state) == ["model"]
    return {key: value.unique().tolist() for key, value in state["model"].items()}


def test_the_weights_alone_are_published_under_their_digest(tmp_path):
    Checkpointer(linear(1), tmp_path, trainer=Counter({})).save("model_final", iteration=9)
    path = tmp_path / "model_final.pth"
    first = publish_weights(path)
    assert publish_weights(path) == first
    digest = hashlib.sha256((tmp_path / first).read_bytes()).hexdigest()
    assert first == str(tmp_path / f"model_final_published-{digest[:8]}.pth")
    assert values_of(first) == {"weight": [1.0], "bias": [1.0]}
    assert sorted(read_file(path)) == ["iteration", "model", "run_id", "trainer"]
    names = ["last_checkpoint", path.name, os.path.basename(first), "run_id"]
    assert sorted(os.listdir(tmp_path)) == names


def test_averaged_weights_are_published_over_those_of_the_model_and_are_an_error_where_there_are_none(
    tmp_path,
):
    path, average = tmp_path / "model_final.pth", {"weight": torch.full((2, 2), 7.0)}
    for hooks in ({}, {"EMAHook": {"steps": 3}}):
        write_file({"model": linear(1).state_dict(), "trainer": {"hooks": hooks}}, path)
        with pytest.raises(CheckpointError, match=r"no weights 'ema' to publish"):
            publish_weights(path, "ema")
        assert os.listdir(tmp_path) == [path.name]
    write_file(
        {"model": linear(1).state_dict(), "trainer": {"hooks": {"EMAHook": {"model": average}}}},
        path,
    )
    assert values_of(publish_weights(path, "ema")) == {"weight": [7.0], "bias": [1.0]}


def run_of(folder, *hooks):
    """Evaluated after iterations 1 and 3; a best file of each of two metrics."""
    checkpointer, results = Checkpointer(nn.Linear(1, 1), folder), iter((60.0, 50.0))
    best = [BestCheckpointer(2, checkpointer, "top1")]
    best += [BestCheckpointer(2, checkpointer, "top5", file_prefix="best_top5")]
    evaluate = EvalHook(2, lambda: {"top1": next(results), "top5": 1.0})
    return Steps([PeriodicCheckpointer(checkpointer, 2), evaluate, *best, PublishWeights(), *hooks])


def test_the_final_and_every_best_file_are_published_after_a_run(tmp_path):
    run_of(tmp_path).train(0, 4)
    found = sorted(
        path.stem.partition("_published-")[0] for path in tmp_path.glob("*_published-????????.pth")
    )
    assert found == ["best_top5", "model_best", "model_final"]
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"


def test_weights_that_cannot_be_published_fail_the_run_and_leave_its_checkpoints(tmp_path):
    damage = AfterStep(lambda trainer: (tmp_path / "model_best.pth").write_bytes(b"broken"))
    damage.priority = "LOWEST"
    trainer = run_of(tmp_path, damage)
    with pytest.raises(CheckpointError, match=r"model_best.pth' is damaged"):
        trainer.train(0, 4)
    assert trainer.status == "failed"
    assert (tmp_path / "model_final.pth").exists()


@pytest.mark.parametrize("format", ["pth", "safetensors"])
def test_published_weights_predict_as_the_final_checkpoint_does(tmp_path, format):
    if format != "pth":
        pytest.importorskip(format)
    cfg = tiny_cfg(
        tmp_path,
        "TEST.EVAL_PERIOD",
        0,
        "CHECKPOINT.PUBLISH",
        "model",
        "CHECKPOINT.PUBLISH_FORMAT",
        format,
    )
    DefaultTrainer(cfg).train()
    (path,) = tmp_path.glob(f"model_final_published-*.{format}")

    def predict(weights):
        cfg.MODEL.WEIGHTS = str(weights)
        return DefaultPredictor(cfg)({"x": torch.tensor([1.0, -2.0, 0.5, 3.0])}).tolist()

    assert predict(path) == predict(tmp_path / "model_final.pth")
    assert predict(path) != predict(tmp_path / "model_0000004.pth")
