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
    assert trainer.status == "finished"
    assert trainer.iter == 10
    assert "finished after 10 iterations" in caplog.text
    assert "raise SOLVER.MAX_ITER" in caplog.text
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


def test_a_file_of_other_contents_is_ignored_and_the_run_evaluates_again(tmp_path):
    results = DefaultTrainer(tiny_cfg(tmp_path)).train()
    for content in (
        "no JSON",
        "[1]",
        '{"iterations": 10}',
        '{"iterations": 10, "max_iter": "ten", "results": {}}',
        '{"iterations": 10, "max_iter": 10, "results": 3}',
        '{"iterations": 9, "max_iter": 10, "results": {}}',
    ):
        (tmp_path / "finished").write_text(content)
        trainer = resumed(tmp_path)
        assert trainer.status == "not started", content
        assert trainer.train() == results, content
        assert trainer.status == "finished"


def test_a_larger_max_iter_trains_on(tmp_path, caplog):
    DefaultTrainer(tiny_cfg(tmp_path)).train()
    trainer = resumed(tmp_path, "SOLVER.MAX_ITER", 12)
    assert (tmp_path / "finished").exists()
    trainer.train()
    assert trainer.start_iter == 10
    assert trainer.iter == 12
    assert trainer.status == "finished"
    assert json.loads((tmp_path / "finished").read_text())["iterations"] == 12
    caplog.clear()
    trainer.train(max_iter=14)  # in the same process too
    assert trainer.iter == 14
    [warning] = [text for text in caplog.messages if "max_iter=14" in text]
    assert "SOLVER.MAX_ITER" in warning
    assert "(12)" in warning


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
        assert trainer.status == "finished"
        assert trainer.iter == 2
    assert not (tmp_path / "model_0000001.pth").exists()  # the run does not go on
    assert "top1" in results["classification"]  # of the evaluation before early stopping
    assert (
        json.loads((tmp_path / "finished").read_text()).items()
        >= {"iterations": 2, "max_iter": 10}.items()
    )
    stored = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    # it is not made again
    assert [line["iteration"] for line in stored if "classification/top1" in line] == [1]


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
        return {"start": trainer.start_iter, "end": trainer.iter}

    assert run(last=3) == {"start": 0, "end": 4}
    assert run(last=3) == {"start": 4, "end": 4}
    assert run(last=6) == {"start": 4, "end": 7}
    assert run(last=6) == {"start": 7, "end": 7}
    assert run(last=20) == {"start": 7, "end": 10}


def rates_by_iteration(folder):
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return {line["iteration"]: line["lr"] for line in lines if "lr" in line}


def cosine_of_torch(num_iters):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_iters)
    rates = []
    for _ in range(num_iters):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    return rates


COSINE = ("SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR", "SOLVER.WARMUP_ITERS", 0, "LOG.PERIOD", 1)


@pytest.mark.parametrize("stop", [None, 6])
def test_a_run_that_is_made_longer_has_the_rates_of_the_new_schedule_at_once(stop, tmp_path):
    """Half a cosine over 20 iterations, from the first new iteration on."""
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *COSINE))
    if stop is not None:
        ask = CallbackHook(after_step=lambda t: t.request_stop("") if t.iter == stop - 1 else None)
        trainer.register_hooks([ask])
    trainer.train()
    done = stop or 10
    resumed(tmp_path, *COSINE, "SOLVER.MAX_ITER", 20).train()
    found = rates_by_iteration(tmp_path)
    rates = [found[iter] for iter in range(20)]
    assert rates[:done] == pytest.approx(cosine_of_torch(10)[:done], abs=1e-12)
    assert rates[done:] == pytest.approx(cosine_of_torch(20)[done:], abs=1e-12)


def test_a_rate_that_a_hook_has_changed_stays_changed_after_a_resume(tmp_path):
    """Uninterrupted: the change counts for one iteration, since the schedule sets the next rate."""

    def halve(trainer):
        if trainer.iter == 4:
            trainer.optimizer.param_groups[0]["lr"] /= 2

    def run(folder, **limits):
        trainer = DefaultTrainer(tiny_cfg(folder, *COSINE, "LOG.PERIOD", 1))
        trainer.register_hooks([CallbackHook(after_step=halve)])
        trainer.resume_or_load()
        trainer.train(**limits)
        return rates_by_iteration(folder)

    whole = run(tmp_path / "whole")
    run(tmp_path / "run", max_iter=5)
    (tmp_path / "run" / "finished").unlink()
    assert run(tmp_path / "run") == whole
    assert whole[5] == pytest.approx(0.025)  # half of the middle of the cosine


def test_the_end_of_the_shorter_run_stays_beside_that_of_the_longer_one(tmp_path):
    keep_one = ("CHECKPOINT.MAX_TO_KEEP", 1, "SOLVER.CHECKPOINT_PERIOD", 4)
    DefaultTrainer(tiny_cfg(tmp_path, *keep_one)).train()
    former = torch.load(tmp_path / "model_final.pth")
    trainer = resumed(tmp_path, *keep_one, "SOLVER.MAX_ITER", 20)
    trainer.train()
    kept = torch.load(tmp_path / "model_0000009.pth")
    assert torch.load(tmp_path / "model_final.pth")["iteration"] == 19
    torch.testing.assert_close(kept["model"], former["model"], rtol=0, atol=0)
    assert kept["iteration"] == former["iteration"] == 9
    trainer.train(max_iter=24)
    trainer.train(max_iter=30)
    numbered = sorted(path.name for path in tmp_path.glob("model_0*.pth"))
    # the ends of the shorter runs, and the newest periodic file
    assert numbered == [f"model_{i:07d}.pth" for i in (9, 19, 23, 27)]

    (tmp_path / "last_checkpoint").write_text("model_0000009.pth")  # it can be resumed
    again = resumed(tmp_path, *keep_one, "SOLVER.MAX_ITER", 20)
    again.train()
    assert again.start_iter == 10
    assert again.iter == 20
    torch.testing.assert_close(
        torch.load(tmp_path / "model_final.pth")["model"],
        torch.load(tmp_path / "model_0000019.pth")["model"],
        rtol=0,
        atol=0,
    )


def test_a_schedule_of_torch_says_that_it_keeps_its_length(tmp_path, caplog):
    class WithTorch(DefaultTrainer):
        @classmethod
        def build_lr_scheduler(cls, cfg, optimizer):
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.SOLVER.MAX_ITER)

    WithTorch(tiny_cfg(tmp_path)).train()
    WithTorch(tiny_cfg(tmp_path)).resume_or_load()
    assert "goes on as in the checkpoint" not in caplog.text
    WithTorch(tiny_cfg(tmp_path, "SOLVER.MAX_ITER", 20)).resume_or_load()
    [text] = [text for text in caplog.messages if "goes on as in the checkpoint" in text]
    assert text.startswith("CosineAnnealingLR ")
    assert "T_max 10 (of this run: 20)" in text
