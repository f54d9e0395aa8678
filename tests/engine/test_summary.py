"""The lines at the end of a run."""

import contextlib
import logging
import re

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


def test_a_finished_run_says_what_was_best_where_the_time_went_and_what_there_is(tmp_path, caplog):
    metric = ["CHECKPOINT.BEST_METRIC", "classification/top1", "DATASETS.VAL", ("tiny_val",), "SOLVER.MAX_ITER", 8]
    hook = HookBase()
    hook.summary = lambda: "42 cows were seen"
    end, time, cows, best, files = summary(tmp_path, caplog, *metric, hooks=[HookBase(), hook])
    assert end == "The run has finished after 8 of 8 iterations"
    assert " s per step, " in time
    assert cows == "42 cows were seen"
    assert re.fullmatch(r"best classification/top1 .*: model_best.pth", best)
    assert (tmp_path / "model_0000004.pth").exists()  # there may be hundreds of them
    names = "finished, last_checkpoint, metrics.json, model_best.pth, model_final.pth"
    assert files == f"files in {tmp_path}: {names}"


def test_a_run_that_has_not_finished_says_how_it_goes_on(tmp_path, caplog):
    def fail(trainer):
        raise RuntimeError("no")

    for action, end in (
        (lambda trainer: trainer.iter == 2 and trainer.request_stop("enough"), "was stopped after 3 of 10 iterations"),
        (fail, "has failed after 0 of 10 iterations"),
    ):
        caplog.clear()
        lines = summary(tmp_path, caplog, hooks=[AfterStep(action)])
        assert lines[0] == f"The run {end}"
        assert lines[-1] == "to go on: the same command with --resume, or trainer.train()"


def test_a_run_that_has_finished_early_says_why_and_of_how_many_iterations(tmp_path, caplog):
    early = ["EARLY_STOPPING.METRIC", "classification/top1", "EARLY_STOPPING.THRESHOLD", 1.0, "TEST.EVAL_PERIOD", 3]
    end, *_ = summary(tmp_path, caplog, *early)
    assert end.startswith("The run has finished after 3 of 10 iterations, early: classification/top1 is ")
