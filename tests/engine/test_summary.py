"""The lines at the end of a run."""

import contextlib
import logging
import sys

import pytest

from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep
from trainkit.engine import DefaultTrainer, HookBase, setup


def summary(tmp_path, caplog, *options, hooks=(), resume=False):
    """Its lines, and the trainer."""
    cfg = tiny_cfg(tmp_path, *options)
    cfg.__dict__[setup._COMMAND] = setup.Command(resume)
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks(list(hooks))
    with caplog.at_level(logging.INFO), contextlib.suppress(RuntimeError):
        trainer.train()
    [text] = [message for message in caplog.messages if message.startswith("The run ")]
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


@pytest.mark.parametrize(
    ("period", "shown"),
    [
        (3, ["model_0000002.pth", "model_0000005.pth", "model_0000008.pth"]),
        (2, ["model_0000001.pth", "...", "model_0000007.pth"]),
        (20, []),
    ],
)
def test_of_many_periodic_checkpoints_the_first_and_the_last_are_named(tmp_path, caplog, period, shown):
    lines, _ = summary(tmp_path, caplog, "SOLVER.CHECKPOINT_PERIOD", period)
    names = lines[-1].split(": ", 1)[1].split(", ")
    assert names == [
        "batch.json",
        "finished",
        "last_checkpoint",
        "metrics.json",
        *shown,
        "model_final.pth",
    ]


def test_a_stopped_run_says_how_it_goes_on(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tools/train_net.py", "OUTPUT_DIR", "my run"])
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "-u", *sys.argv])
    stop = AfterStep(lambda trainer: trainer.request_stop("enough") if trainer.iter == 2 else None)
    lines, trainer = summary(tmp_path, caplog, hooks=[stop])
    assert lines[0] == f"The run was stopped after 3 of {trainer.max_iter} iterations"
    assert lines[-1] == "to go on: python -u tools/train_net.py --resume OUTPUT_DIR 'my run'"


def fail(trainer):
    if trainer.iter == 6:
        raise RuntimeError("no")


def test_a_failed_run_says_so(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/me/jobs/train.py", "--lr", "1"])
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "jobs.train", "--lr", "1"])
    lines, _ = summary(tmp_path, caplog, hooks=[AfterStep(fail)])
    assert lines[0] == "The run has failed after 6 of 10 iterations"
    assert lines[-1] == "to go on: python -m jobs.train --resume --lr 1"


def test_a_command_that_resumes_as_it_stands_is_not_changed(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--lr", "1"])
    lines, _ = summary(tmp_path, caplog, hooks=[AfterStep(fail)], resume=True)
    assert lines[-1] == "to go on: python train.py --lr 1"


@pytest.mark.parametrize("argv", [["train.py"], []])
def test_without_a_script_that_has_said_how_it_resumes_the_calls_are_named(tmp_path, caplog, monkeypatch, argv):
    monkeypatch.setattr(sys, "argv", argv)
    lines, _ = summary(tmp_path, caplog, hooks=[AfterStep(fail)], resume=None)
    assert lines[-1] == "to go on: build the trainer again, resume_or_load(resume=True), train()"


def test_under_torchrun_it_is_its_command(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    lines, _ = summary(tmp_path, caplog, hooks=[AfterStep(fail)])
    assert lines[-1] == "to go on: the same torchrun command, with --resume after the script"


def test_before_the_first_checkpoint_there_is_nothing_to_go_on_from(tmp_path, caplog):
    lines, _ = summary(tmp_path, caplog, "SOLVER.CHECKPOINT_PERIOD", 8, hooks=[AfterStep(fail)])
    assert lines[-1] == "there is no checkpoint"


def test_a_hook_has_its_say(tmp_path, caplog):
    class Mine(HookBase):
        def summary(self):
            return "42 cows were seen"

    class Silent(HookBase):
        pass

    class Wrong(HookBase):
        summary = "no method"

    lines, trainer = summary(tmp_path, caplog, hooks=[Silent(), Wrong(), Mine()])
    assert trainer.status == "finished"
    assert lines[-2] == "42 cows were seen"
    assert "" not in lines
    assert "Wrong.summary() has failed, so its line is left out:" in caplog.messages


def test_a_run_that_never_began_says_nothing(tmp_path, caplog):
    trainer = DefaultTrainer(tiny_cfg(tmp_path))
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match="start_iter"):
        trainer.train(start_iter=-1)
    assert not [message for message in caplog.messages if message.startswith("The run ")]
