"""A run that has finished is not started again, and goes on if its end is moved."""

import json

import pytest
import torch

from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer, HookBase
from trainkit.engine.hooks import CallbackHook


def resumed(folder, *options):
    trainer = DefaultTrainer(tiny_cfg(folder, *options))
    trainer.resume_or_load()
    return trainer


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_finished_run_that_is_resumed_says_so_and_does_nothing(tmp_path, caplog):
    results = DefaultTrainer(tiny_cfg(tmp_path)).train()
    before = files(tmp_path)
    trainer = resumed(tmp_path)
    assert trainer.train() == results
    assert (trainer.status, trainer.iter) == ("finished", 10)
    assert (
        "This run has finished after 10 iterations, so nothing is done; to train on, raise max_iter"
        in caplog.text
    )
    assert files(tmp_path) == before
    (tmp_path / "last_checkpoint").write_text("model_0000004.pth")  # the user goes back
    earlier = resumed(tmp_path)
    assert earlier.train() == results
    torch.testing.assert_close(
        earlier.model.state_dict(), trainer.model.state_dict(), rtol=0, atol=0
    )
    (tmp_path / "model_final.pth").rename(tmp_path / "model_best.pth")
    (tmp_path / "model_final.pth").write_text("damaged")
    resumed(tmp_path).train()
    assert torch.load(tmp_path / "model_final.pth")["iteration"] == 9


def test_a_larger_max_iter_trains_on(tmp_path):
    DefaultTrainer(tiny_cfg(tmp_path)).train()
    trainer = resumed(tmp_path, "SOLVER.MAX_ITER", 12)
    assert (tmp_path / "finished").exists()
    trainer.train()
    assert (trainer.start_iter, trainer.iter, trainer.status) == (10, 12, "finished")
    assert json.loads((tmp_path / "finished").read_text())["iterations"] == 12
    trainer.train(max_iter=14)  # in the same process too
    assert trainer.iter == 14


EARLY = (
    "EARLY_STOPPING.METRIC",
    "classification/top1",
    "EARLY_STOPPING.THRESHOLD",
    -1.0,
    "TEST.EVAL_PERIOD",
    2,
)


def test_early_stopping_finishes_a_run_and_a_resumed_one_does_the_rest(tmp_path):
    def interrupt(trainer):
        raise KeyboardInterrupt

    trainer = DefaultTrainer(tiny_cfg(tmp_path, *EARLY))
    trainer.register_hooks([CallbackHook(after_train=interrupt)], after="EarlyStopping")
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert torch.load(tmp_path / "model_final.pth")["iteration"] == 1
    assert not (tmp_path / "finished").exists()

    for _ in range(2):
        trainer = resumed(tmp_path, *EARLY)
        results = trainer.train()
        assert (trainer.status, trainer.iter) == ("finished", 2)
    assert "top1" in results["classification"]  # of the evaluation before early stopping
    assert (
        json.loads((tmp_path / "finished").read_text()).items()
        >= {"iterations": 2, "max_iter": 10}.items()
    )
    stored = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert [line["iteration"] for line in stored if "classification/top1" in line] == [
        1
    ]  # it is not made again


def impatient(patience):
    """No value after the first one is better, so the run ends after ``1 + patience`` evaluations."""
    metric = ("EARLY_STOPPING.METRIC", "classification/top1", "EARLY_STOPPING.MIN_DELTA", 1000.0)
    return (*metric, "TEST.EVAL_PERIOD", 2, "EARLY_STOPPING.PATIENCE", patience)


@pytest.mark.parametrize(
    ("before", "after", "done"),
    [
        (impatient(1), impatient(3), 8),
        (impatient(1), (*impatient(1), "EARLY_STOPPING.METRIC", ""), 10),
        (EARLY, (*EARLY, "EARLY_STOPPING.THRESHOLD", None, "EARLY_STOPPING.PATIENCE", 9), 10),
    ],
    ids=["more patience", "no early stopping", "no threshold"],
)
def test_a_run_that_early_stopping_has_ended_goes_on_with_other_settings(
    before, after, done, tmp_path
):
    """It ends with the bits of a run that had these settings from the start."""

    def start(folder, options):
        torch.manual_seed(0)
        trainer = DefaultTrainer(tiny_cfg(folder, *options))
        trainer.train()
        return trainer

    whole = start(tmp_path / "whole", after)
    start(tmp_path / "run", before)
    first_end = json.loads((tmp_path / "run" / "finished").read_text())["iterations"]
    assert first_end == (2 if before is EARLY else 4)
    same = resumed(tmp_path / "run", *before)
    same.train()
    assert same.start_iter == first_end == same.iter

    trainer = resumed(tmp_path / "run", *after)
    trainer.train()
    assert trainer.start_iter == first_end
    assert trainer.iter == whole.iter == done
    torch.testing.assert_close(trainer.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_a_hook_that_is_registered_after_loading_decides_too_and_other_hooks_may_have_settings(
    tmp_path,
):
    class EndsAt(HookBase):
        def __init__(self, last):
            self.last = last

        def after_step(self):
            if self.trainer.iter == self.last:
                self.trainer.request_stop("enough", finished=True)

        def settings_of_early_end(self):
            return {"last": self.last}

    def run(last):
        trainer = DefaultTrainer(tiny_cfg(tmp_path))
        trainer.resume_or_load()
        trainer.register_hooks([EndsAt(last)])
        trainer.train()
        return trainer.start_iter, trainer.iter

    assert [run(last) for last in (3, 3, 6, 6, 20)] == [(0, 4), (4, 4), (4, 7), (7, 7), (7, 10)]
