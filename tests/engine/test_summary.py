"""The lines at the end of a run."""

import contextlib
import logging
import sys

import pytest

from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep
from trainkit.engine import DefaultTrainer, HookBase


def summary(tmp_path, caplog, *options, hooks=()):
    """Its lines, and the trainer."""
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *options))
    trainer.register_hooks(list(hooks))
    with caplog.at_level(logging.INFO), contextlib.suppress(RuntimeError):
        trainer.train()
    [text] = [message for message in caplog.messages if message.startswith("The run ")]
    assert caplog.messages[-1] == text or trainer.status != "finished"
    return [line.strip() for line in text.splitlines()], trainer


def test_a_finished_run_says_what_was_best_where_the_time_went_and_what_there_is(tmp_path, caplog):
    metric = ["CHECKPOINT.BEST_METRIC", "classification/top1", "DATASETS.VAL", ("tiny_val",)]
    (end, time, best, files), _ = summary(tmp_path, caplog, *metric, "SOLVER.MAX_ITER", 8)
    assert end == "The run has finished after 8 of 8 iterations"
    assert " s per step, " in time
    assert best.startswith("best classification/top1 ")
    assert best.endswith(": model_best.pth")
    present = sorted(path.name for path in tmp_path.iterdir())
    assert {"model_final.pth", "model_best.pth", "metrics.json"} < set(present)
    assert files == f"files in {tmp_path}: {', '.join(present)}"


def test_a_stopped_run_says_how_it_goes_on(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tools/train_net.py", "OUTPUT_DIR", "my run"])
    stop = AfterStep(lambda trainer: trainer.request_stop("enough") if trainer.iter == 2 else None)
    lines, trainer = summary(tmp_path, caplog, hooks=[stop])
    assert lines[0] == f"The run was stopped after 3 of {trainer.max_iter} iterations"
    assert lines[-1] == "to go on: python tools/train_net.py --resume OUTPUT_DIR 'my run'"


def test_a_failed_run_says_so(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--resume"])

    def fail(trainer):
        raise RuntimeError("no")

    lines, _ = summary(tmp_path, caplog, hooks=[AfterStep(fail)])
    assert lines[0].startswith("The run has failed after 0 of ")
    assert lines[-1] == "to go on: python train.py --resume"


def test_a_hook_has_its_say(tmp_path, caplog):
    class Mine(HookBase):
        def summary(self):
            return "42 cows were seen"

    class Silent(HookBase):
        def summary(self):
            return ""

    lines, _ = summary(tmp_path, caplog, hooks=[Silent(), Mine()])
    assert lines[-2] == "42 cows were seen"
    assert "" not in lines


def test_a_run_that_never_began_says_nothing(tmp_path, caplog):
    trainer = DefaultTrainer(tiny_cfg(tmp_path))
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match="start_iter"):
        trainer.train(start_iter=-1)
    assert not [message for message in caplog.messages if message.startswith("The run ")]
