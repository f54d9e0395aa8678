"""The lines at the end of a run."""

import contextlib
import logging

import pytest

from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep
from trainkit.engine import DefaultTrainer, HookBase


def summary(tmp_path, caplog, *options, hooks=()):
    """Its lines."""
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *options))
    trainer.register_hooks(list(hooks))
    with caplog.at_level(logging.INFO), contextlib.suppress(RuntimeError):
        trainer.train()
    [text] = [message for message in caplog.messages if message.startswith("The run ")]
    return [line.strip() for line in text.splitlines()]


class Cows(HookBase):
    def summary(self):
        return "42 cows were seen"


def test_a_finished_run_says_what_was_best_where_the_time_went_and_what_there_is(tmp_path, caplog):
    metric = ["CHECKPOINT.BEST_METRIC", "classification/top1", "DATASETS.VAL", ("tiny_val",), "SOLVER.MAX_ITER", 8]
    end, time, cows, best, files = summary(tmp_path, caplog, *metric, hooks=[HookBase(), Cows()])
    assert end == "The run has finished after 8 of 8 iterations"
    assert " s per step, " in time
    assert cows == "42 cows were seen"
    assert best.startswith("best classification/top1 ")
    assert best.endswith(": model_best.pth")
    assert (tmp_path / "model_0000004.pth").exists()  # there may be hundreds of them
    names = "finished, last_checkpoint, metrics.json, model_best.pth, model_final.pth"
    assert files == f"files in {tmp_path}: {names}"


def fail(trainer):
    if trainer.iter == 6:
        raise RuntimeError("no")


def stop(trainer):
    if trainer.iter == 2:
        trainer.request_stop("enough")


@pytest.mark.parametrize(
    ("action", "end"), [(stop, "was stopped after 3 of 10 iterations"), (fail, "has failed after 6 of 10 iterations")]
)
def test_a_run_that_has_not_finished_says_how_it_goes_on(tmp_path, caplog, action, end):
    lines = summary(tmp_path, caplog, hooks=[AfterStep(action)])
    assert lines[0] == f"The run {end}"
    assert lines[-1] == "to go on: the same command with --resume, or trainer.train()"


def test_a_run_that_has_finished_early_says_why_and_of_how_many_iterations(tmp_path, caplog):
    early = ["EARLY_STOPPING.METRIC", "classification/top1", "EARLY_STOPPING.THRESHOLD", 1.0, "TEST.EVAL_PERIOD", 3]
    end, *_ = summary(tmp_path, caplog, *early)
    assert end.startswith("The run has finished after 3 of 10 iterations, early: classification/top1 is ")


def test_a_run_that_never_started_says_nothing(tmp_path, caplog):
    trainer = DefaultTrainer(tiny_cfg(tmp_path))
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match="start_iter"):
        trainer.train(start_iter=-1)
    assert not [message for message in caplog.messages if message.startswith("The run ")]
