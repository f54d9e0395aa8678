"""The checkpoints of the best values, with and without asynchronous saves."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Steps
from tests.two_ranks import on_two_ranks
from trainkit.checkpoint import Checkpointer
from trainkit.checkpoint.file import read_file
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import BestCheckpointer, BestCheckpoints, EvalHook, PeriodicCheckpointer


def run_of_best(folder, values, save_format="", mode="max"):
    """Evaluations after each iteration, two of which are kept."""
    trainer, results = Steps(), iter(values)
    checkpointer = Checkpointer(nn.Linear(1, 1), folder, format=save_format, trainer=trainer)
    best = BestCheckpoints(1, checkpointer, "top1", mode, num_to_keep=2)
    trainer.register_hooks([EvalHook(1, lambda: {"top1": next(results)}), best, PeriodicCheckpointer(checkpointer, 3)])
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
def test_the_best_k_files_are_kept_and_others_removed(tmp_path, values, mode, kept, best, save_format):
    trainer, checkpointer = run_of_best(tmp_path, values, save_format, mode)
    trainer.train(0, len(values))
    checkpointer.wait()
    assert files_of_best(tmp_path) == {"": best} | {f"_{iteration:07d}": iteration for iteration in kept}
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"


def test_a_checkpoint_of_before_has_the_best_k_files_under_the_name_of_the_base_class(tmp_path):
    values = [50.0, 70.0, 60.0, 80.0, 65.0, 75.0]
    run_of_best(tmp_path, values)[0].train(0, 4)
    state = read_file(tmp_path / "model_0000002.pth")
    state["trainer"]["hooks"]["BestCheckpointer"] = state["trainer"]["hooks"].pop("BestCheckpoints")
    torch.save(state, tmp_path / "before.pth")
    again, checkpointer = run_of_best(tmp_path, values[2:])
    checkpointer.load(tmp_path / "before.pth")
    again.train(3, 6)
    assert files_of_best(tmp_path) == {"": 3, "_0000003": 3, "_0000005": 5}


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


def test_all_ranks_know_that_a_file_of_rank_0_is_not_there(tmp_path):
    kept = [["model_best_0000005", 2.0], ["model_best_0000001", 1.0]]
    assert on_two_ranks([_a_file_fails_on_rank_0], tmp_path) == {"_a_file_fails_on_rank_0": [kept, []]}


def test_a_config_makes_one_hook_for_each_metric(tmp_path):
    best = ("CHECKPOINT.BEST_METRIC", ["classification/top1", "classification/mean_class_accuracy"])
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *best, "CHECKPOINT.BEST_TO_KEEP", 2))
    hooks = [(type(hook), hook.file_prefix) for hook in trainer.hooks if isinstance(hook, BestCheckpointer)]
    names = ["model_best_classification_top1", "model_best_classification_mean_class_accuracy"]
    assert hooks == [(BestCheckpoints, name) for name in names]
