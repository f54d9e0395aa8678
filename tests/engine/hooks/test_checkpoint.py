import math

import fvcore.common.checkpoint
import pytest
import torch
from torch import nn

from tests.engine.tiny import AfterStep, Steps, Weight, fail_at, sgd
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.config import ConfigError, get_cfg, resolve_lengths
from trainkit.engine.hooks import BestCheckpointer, CallbackHook, EvalHook, PeriodicCheckpointer
from trainkit.engine.hooks.checkpoint import best_file_prefixes
from trainkit.engine.step import SimpleTrainer

BOTH = pytest.mark.parametrize("checkpointer_class", [Checkpointer, fvcore.common.checkpoint.Checkpointer])


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def load(path):
    return torch.load(path, weights_only=True)


class Recorder:
    """A checkpointer that notes what is saved; the disk is full in the iterations ``full``."""

    save_dir = ""
    save_to_disk = False

    def __init__(self, full=()):
        self.saved = []
        self.full = full

    def save(self, name, *, iteration):
        if iteration in self.full:
            raise CheckpointError("no space left")
        self.saved.append((name, iteration))


# ---------------------------------------------------------------------- PeriodicCheckpointer


@BOTH
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"period": 3}, ["model_0000002.pth", "model_0000005.pth", "model_0000008.pth", "model_final.pth"]),
        ({"period": 5}, ["model_0000004.pth", "model_final.pth"]),
        ({"period": 0}, ["model_final.pth"]),
        ({"period": 2, "max_to_keep": 2}, ["model_0000007.pth", "model_final.pth"]),
        ({"period": 6, "file_prefix": "net"}, ["net_0000005.pth", "net_final.pth"]),
    ],
)
def test_the_files_of_a_run(tmp_path, checkpointer_class, arguments, expected):
    model = Weight()
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], sgd(model, lr=0.5))
    checkpointer = checkpointer_class(model, str(tmp_path), trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, **arguments)])
    trainer.train(0, 10)
    assert files(tmp_path) == ["last_checkpoint", *expected]
    assert (tmp_path / "last_checkpoint").read_text() == expected[-1]
    state = load(tmp_path / expected[-1])
    assert (state["iteration"], state["trainer"]["iteration"], state["model"]["weight"].item()) == (9, 9, -4.0)


def run_config(folder, *options, per_epoch=3):
    """(iteration, file) of what a run of this config leaves."""
    cfg = get_cfg()
    cfg.merge_from_list(options)
    cfg = resolve_lengths(cfg, per_epoch)
    model = nn.Linear(1, 1)
    hook = PeriodicCheckpointer(
        Checkpointer(model, folder),
        cfg.SOLVER.CHECKPOINT_PERIOD,
        max_to_keep=cfg.CHECKPOINT.MAX_TO_KEEP,
        start=cfg.CHECKPOINT.START,
        save_last=cfg.CHECKPOINT.SAVE_LAST,
    )
    Steps([hook]).train(0, cfg.SOLVER.MAX_ITER)
    return sorted((load(path)["iteration"], path.stem) for path in folder.glob("*.pth"))


@pytest.mark.parametrize(("unit", "per_unit"), [("", 1), ("ep", 3)])
@pytest.mark.parametrize(
    ("length", "options", "saved_after", "has_final"),
    [
        (21, ["SAVE_LAST", False], [5, 10, 15, 20], False),
        (21, ["SAVE_LAST", True], [5, 10, 15, 20, 21], True),
        (20, ["SAVE_LAST", True], [5, 10, 15, 20], True),
        (20, ["SAVE_LAST", True, "MAX_TO_KEEP", 2], [15, 20], True),
        (20, ["SAVE_LAST", False, "MAX_TO_KEEP", 2], [15, 20], False),
        (20, ["SAVE_LAST", False, "START", 12], [12, 17], False),
    ],
)
def test_saves_every_5_of_a_run(tmp_path, unit, per_unit, length, options, saved_after, has_final):
    lengths = {"SOLVER.MAX_ITER": length, "SOLVER.CHECKPOINT_PERIOD": 5}
    chosen = dict(zip(options[::2], options[1::2], strict=True))
    lengths |= {"CHECKPOINT.START": chosen.pop("START")} if "START" in chosen else {}
    given = {key: f"{value}{unit}" if unit else value for key, value in lengths.items()}
    given |= {f"CHECKPOINT.{key}": value for key, value in chosen.items()}

    left = run_config(tmp_path, *(item for pair in given.items() for item in pair), per_epoch=per_unit)

    iterations = [done * per_unit - 1 for done in saved_after]
    names = [f"model_{iteration:07d}" for iteration in iterations]
    if has_final:
        names[-1] = "model_final"
    assert left == list(zip(iterations, names, strict=True))


def test_a_run_that_finished_early_has_no_final_file_if_there_should_be_none():
    recorder = Recorder()
    trainer = Steps([PeriodicCheckpointer(recorder, 2, save_last=False)])
    trainer.register_hooks([AfterStep(lambda t: t.iter == 2 and t.request_stop("enough", finished=True))])
    trainer.train(0, 9)
    assert (trainer.status, recorder.saved) == ("finished", [("model_0000001", 1)])


def test_a_periodic_save_that_fails_is_logged_and_the_run_goes_on(caplog):
    recorder = Recorder(full=[3])
    trainer = Steps([PeriodicCheckpointer(recorder, 2)])
    trainer.train(0, 7)
    assert trainer.status == "finished"
    assert recorder.saved == [("model_0000001", 1), ("model_0000005", 5), ("model_final", 6)]
    assert "The checkpoint 'model_0000003' is not saved, training continues: no space left" in caplog.messages


def test_a_run_that_finished_early_has_its_final_file_and_others_do_not():
    for finished, last in ((True, "model_final"), (False, "model_0000002")):
        recorder = Recorder()
        trainer = Steps([PeriodicCheckpointer(recorder, 2)])
        trainer.register_hooks(
            [AfterStep(lambda t, how=finished: t.iter == 2 and t.request_stop("enough", finished=how))]
        )
        trainer.train(0, 9)
        assert recorder.saved == [("model_0000001", 1), (last, 2)]
    recorder = Recorder()
    with pytest.raises(RuntimeError):
        Steps([PeriodicCheckpointer(recorder, 2)], step=fail_at(3)).train(0, 4)
    assert recorder.saved == [("model_0000001", 1)]


@pytest.mark.usefixtures("worker")
def test_a_loss_that_is_not_finite_is_found_before_the_checkpoint_also_asynchronously():
    recorder = Recorder()
    model = Weight()
    data = [torch.tensor(1.0), torch.tensor(math.nan)]
    trainer = SimpleTrainer(model, data, sgd(model), async_write_metrics=True)
    trainer.register_hooks([PeriodicCheckpointer(recorder, 2)])
    with pytest.raises(FloatingPointError, match="in iteration 1"):
        trainer.train(0, 4)
    assert recorder.saved == []


# ---------------------------------------------------------------------- a run that is stopped


def stop_at(iter):
    return AfterStep(lambda trainer: trainer.iter == iter and trainer.request_stop("enough"))


@pytest.mark.parametrize(
    ("period", "kept"), [(0, ["model_0000004.pth"]), (2, ["model_0000003.pth", "model_0000004.pth"])]
)
def test_a_run_that_is_stopped_is_saved_where_it_stands_and_counts_in_the_rotation(tmp_path, save_format, period, kept):
    def make(*hooks):
        trainer = Steps()
        checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path, format=save_format, trainer=trainer)
        trainer.register_hooks([PeriodicCheckpointer(checkpointer, period, max_to_keep=2), *hooks])
        return trainer, checkpointer

    trainer, _ = make(stop_at(4))
    trainer.train(0, 9)
    assert (trainer.status, files(tmp_path)) == ("stopped", ["last_checkpoint", *kept])
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000004.pth"
    assert load(tmp_path / "model_0000004.pth")["iteration"] == 4

    trainer, checkpointer = make()
    checkpointer.resume_or_load("")
    trainer.train(trainer.iter + 1, 9)
    assert (trainer.status, trainer.start_iter) == ("finished", 5)


def test_a_stop_after_a_save_writes_again_since_stage_2_of_the_iteration_is_done():
    recorder = Recorder()
    trainer = Steps([PeriodicCheckpointer(recorder, 4), stop_at(3)])
    trainer.train(0, 9)

    assert trainer.status == "stopped"
    assert recorder.saved == 2 * [("model_0000003", 3)]


def test_a_stop_whose_save_fails_fails_the_run(tmp_path, save_format):
    (tmp_path / "model_0000002.pth").mkdir()  # nothing can be renamed to that
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path, format=save_format)
    trainer = Steps([PeriodicCheckpointer(checkpointer, 0), stop_at(2)])
    with pytest.raises(CheckpointError, match=r"cannot write .*model_0000002\.pth"):
        trainer.train(0, 9)
    assert trainer.status == "failed"


@pytest.mark.parametrize(
    ("failing", "save_last"), [("model_final", True), ("model_0000003", False), ("model_0000005", False)]
)
def test_a_run_whose_last_save_fails_has_failed(tmp_path, save_format, failing, save_last):
    (tmp_path / f"{failing}.pth").mkdir()
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path, format=save_format)
    trainer = Steps([PeriodicCheckpointer(checkpointer, 2, save_last=save_last)])
    length = 6 if failing == "model_0000005" else 5
    with pytest.raises(CheckpointError, match=rf"cannot write .*{failing}\.pth"):
        trainer.train(0, length)
    assert (trainer.status, trainer.iter) == ("failed", length)

    (tmp_path / f"{failing}.pth").rmdir()
    trainer.train(0, length)  # the same trainer and hooks, and nothing is left of the failure
    assert trainer.status == "finished"


def test_the_files_of_a_run_are_the_same_whoever_writes_them(tmp_path, save_format):
    trainer = Steps()
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path, format=save_format, trainer=trainer)
    values = iter([1.0, 3.0, 2.0, 4.0])
    trainer.register_hooks(
        [
            PeriodicCheckpointer(checkpointer, 2, max_to_keep=2),
            EvalHook(2, lambda: {"top1": next(values)}),
            BestCheckpointer(2, checkpointer, "top1"),
        ]
    )
    trainer.train(0, 8)
    assert {path.stem: load(path)["iteration"] for path in sorted(tmp_path.glob("*.pth"))} == {
        "model_0000005": 5,
        "model_best": 7,
        "model_final": 7,
    }
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"


def best_run(folder, values, fails_at, save_format, checkpoints=()):
    """Evaluations after each iteration; the best file cannot be written while ``fails_at`` is the iteration."""
    trainer, results, best = Steps(), iter(values), folder / "model_best.pth"
    checkpointer = Checkpointer(nn.Linear(1, 1), folder, format=save_format, trainer=trainer)

    def block(trainer):
        if trainer.iter == fails_at:
            best.rename(folder / "aside")
            best.mkdir()

    def unblock(trainer):
        checkpointer.has_checkpoint()
        if trainer.iter - 1 == fails_at < trainer.max_iter - 1:
            best.rmdir()
            (folder / "aside").rename(best)

    trainer.register_hooks(
        [
            EvalHook(1, lambda: {"top1": next(results)}),
            BestCheckpointer(1, checkpointer, "top1"),
            CallbackHook(before_step=unblock, after_train=unblock),
            CallbackHook(before_step=block),
            *(PeriodicCheckpointer(checkpointer, period) for period in checkpoints),
        ]
    )
    return trainer


def test_a_best_value_counts_only_if_its_file_is_there(tmp_path, save_format):
    trainer = best_run(tmp_path, [50.0, 80.0, 70.0, 60.0], 1, save_format, checkpoints=[2])
    best = []
    note = CallbackHook(before_step=lambda t: best.append(t.state_dict()["hooks"]["BestCheckpointer"]["best"]))
    trainer.register_hooks([note])
    trainer.train(0, 4)

    assert trainer.status == "finished"
    assert best == [None, 50.0, 50.0, 70.0]  # of 80 there is no file
    assert load(tmp_path / "model_best.pth")["iteration"] == 2
    assert load(tmp_path / "model_0000001.pth")["trainer"]["hooks"]["BestCheckpointer"]["best"] == 50.0  # before it
    assert load(tmp_path / "model_best.pth")["trainer"]["hooks"]["BestCheckpointer"]["best"] == 70.0


def test_a_best_save_that_fails_at_the_end_fails_the_run_and_the_best_value_is_the_one_before(tmp_path, save_format):
    trainer = best_run(tmp_path, [50.0, 80.0], 1, save_format)
    with pytest.raises(CheckpointError, match=r"cannot write .*model_best\.pth"):
        trainer.train(0, 2)
    assert trainer.status == "failed"
    assert trainer.state_dict()["hooks"]["BestCheckpointer"]["best"] == 50.0
    assert load(tmp_path / "aside")["iteration"] == 0


# ---------------------------------------------------------------------- BestCheckpointer


def best_saves(values, mode="max", **kwargs):
    """The iterations of the saves when each second iteration gives the next value, the last one after training."""
    recorder = Recorder(**kwargs)
    results = iter(values)
    trainer = Steps([EvalHook(2, lambda: {"top1": next(results)}), BestCheckpointer(2, recorder, "top1", mode)])
    recorder.tag_last_checkpoint = None  # it has no folder, so there is no tag
    trainer.train(0, 2 * len(values))
    assert {name for name, _ in recorder.saved} <= {"model_best"}
    return [iteration for _, iteration in recorder.saved]


@pytest.mark.parametrize(
    ("values", "mode", "expected"),
    [
        ([50.0, 70.0, 70.0, 60.0, 80.0], "max", [1, 3, 9]),
        ([3.0, 2.0, 2.5, 1.0], "min", [1, 3, 7]),
        ([math.nan, math.inf, 50.0, -math.inf, math.nan, 60.0, 40.0], "max", [5, 11]),
        ([-math.inf, 2.0, math.nan, -math.inf, 1.0], "min", [3, 9]),
        ([0.0, -1.0], "max", [1]),
        ([50.0, 70.0, 60.0], "auto", [1, 3]),
    ],
)
def test_each_best_value_is_saved_and_a_value_that_is_not_finite_never_is(values, mode, expected):
    assert best_saves(values, mode) == expected


class Uploading(Checkpointer):
    """Returns the path of the file, as methods that upload it do."""

    def save(self, name, **kwargs):
        super().save(name, **kwargs)
        return f"{self.save_dir}/{name}.pth"


def test_an_overridden_save_may_return_anything(tmp_path):
    model = Weight()
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], sgd(model))
    checkpointer = Uploading(model, str(tmp_path), trainer=trainer)
    hooks = [
        PeriodicCheckpointer(checkpointer, 2),
        EvalHook(2, lambda: {"metric": 1.0}),
        BestCheckpointer(2, checkpointer, "metric"),
    ]
    trainer.register_hooks(hooks)
    trainer.train(0, 4)
    assert files(tmp_path) == ["last_checkpoint", "model_0000001.pth", "model_best.pth", "model_final.pth"]


def best_trainer(folder, checkpointer_class, values):
    model = nn.Linear(1, 1)
    trainer = Steps()
    checkpointer = checkpointer_class(model, str(folder), trainer=trainer)
    results = iter(values)
    trainer.register_hooks(
        [
            PeriodicCheckpointer(checkpointer, 2),
            EvalHook(2, lambda: {"top1": next(results)}),
            BestCheckpointer(2, checkpointer, "top1"),
        ]
    )
    return trainer, checkpointer


@BOTH
def test_the_best_value_is_remembered_over_a_resume_and_last_checkpoint_stays(tmp_path, checkpointer_class):
    first, _ = best_trainer(tmp_path, checkpointer_class, [50.0, 80.0, 70.0])
    first.train(0, 6)
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"
    assert load(tmp_path / "model_best.pth")["iteration"] == 3

    # the first is that of iteration 5 again, which is no longer the last one
    second, checkpointer = best_trainer(tmp_path, checkpointer_class, [70.0, 75.0, 79.0, 81.0])
    checkpointer.resume_or_load("", resume=True)
    assert second.iter == 5
    best = []
    second.register_hooks([AfterStep(lambda trainer: best.append(load(tmp_path / "model_best.pth")["iteration"]))])
    second.train(6, 12)
    assert best == [3] * 6
    assert load(tmp_path / "model_best.pth")["iteration"] == 11
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"


@BOTH
def test_a_best_save_before_any_other_leaves_no_last_checkpoint(tmp_path, checkpointer_class):
    checkpointer = checkpointer_class(nn.Linear(1, 1), str(tmp_path))
    trainer = Steps([EvalHook(1, lambda: {"top1": 1.0}), BestCheckpointer(1, checkpointer, "top1")])
    trainer.train(0, 2)
    assert files(tmp_path) == ["model_best.pth"]


def test_a_missing_metric_is_an_error_with_the_nearest_name():
    hooks = [EvalHook(1, lambda: {"cls": {"top1": 1, "loss": 2}}), BestCheckpointer(1, Recorder(), "cls/top_1")]
    with pytest.raises(ValueError, match=r"'cls/top_1'; did you mean 'cls/top1'\? known are: cls/loss, cls/top1"):
        Steps(hooks).train(0, 2)
    with pytest.raises(ValueError, match="given the metric 'top1'; known are: none"):
        Steps([BestCheckpointer(1, Recorder(), "top1")]).train(0, 2)


def test_it_follows_evaluations_with_an_offset():
    results = iter([50.0, 70.0, 60.0])
    for offset, expected in ((3, [2, 6]), (0, [3, 7])):  # otherwise other weights than those evaluated are saved
        recorder = Recorder()
        results = iter([50.0, 70.0, 60.0])
        evaluate = EvalHook(4, lambda results=results: {"top1": next(results)}, offset=3)
        trainer = Steps([evaluate, BestCheckpointer(4, recorder, "top1", offset=offset)])
        trainer.train(0, 9)
        assert [iteration for _, iteration in recorder.saved] == expected


def test_each_of_several_metrics_has_a_file_and_a_memory_of_its_own(tmp_path):
    def make():
        model = nn.Linear(1, 1)
        checkpointer = Checkpointer(model, tmp_path)
        best = [
            BestCheckpointer(1, checkpointer, metric, "auto", prefix)
            for metric, prefix in best_file_prefixes(["a/top1", "a/loss"]).items()
        ]
        trainer = Steps([EvalHook(1, lambda: {"a": dict(zip(("top1", "loss"), results.pop(0), strict=True))}), *best])
        checkpointer.add_checkpointable("trainer", trainer)
        return trainer

    def saved():
        return {path.stem: load(path)["iteration"] for path in sorted(tmp_path.glob("*.pth"))}

    results = [(50, 3.0), (60, 4.0), (55, 2.0)]
    first = make()
    first.train(0, 3)
    assert saved() == {"model_best_a_loss": 2, "model_best_a_top1": 1}

    results = [(58, 1.0), (59, 5.0)]
    second = make()
    second.load_state_dict(first.state_dict())
    second.train(3, 5)
    assert saved() == {"model_best_a_loss": 3, "model_best_a_top1": 1}


def test_a_best_value_of_another_metric_or_mode_is_not_taken_over(caplog):
    def resume(metric, mode, taken_by):
        recorder = Recorder()
        first = Steps([EvalHook(0, lambda: {"top1": 50, "top5": 50}), BestCheckpointer(0, recorder, metric, mode)])
        first.train(0, 2)
        second = Steps([EvalHook(0, lambda: {"top1": 40, "top5": 40}), BestCheckpointer(0, recorder, "top1", taken_by)])
        second.load_state_dict(first.state_dict())
        second.train(2, 4)
        return [iteration for _, iteration in recorder.saved]

    assert resume("top1", "auto", "max") == [1]
    assert caplog.messages == []
    assert resume("top5", "max", "max") == [1, 3]
    assert resume("top1", "min", "max") == [1, 3]
    assert caplog.messages == [
        "The best value of the checkpoint is of top5 (max), not of top1 (max)",
        "The best value of the checkpoint is of top1 (min), not of top1 (max)",
    ]


@pytest.mark.parametrize(
    ("metrics", "prefixes"),
    [
        (None, {}),
        ("", {}),
        ([], {}),
        ("a/top1", {"a/top1": "model_best"}),
        (["a/top1"], {"a/top1": "model_best"}),
        (["a/top1", "b/c/loss"], {"a/top1": "model_best_a_top1", "b/c/loss": "model_best_b_c_loss"}),
    ],
)
def test_a_single_metric_has_model_best_and_several_are_told_apart_by_name(metrics, prefixes):
    assert best_file_prefixes(metrics) == prefixes


@pytest.mark.parametrize("metrics", [["a/b", "a_b"], ["a", "b", "a"]])
def test_two_metrics_for_one_file_are_an_error(metrics):
    with pytest.raises(ConfigError, match="CHECKPOINT.BEST_METRIC .* has two metrics for one file"):
        best_file_prefixes(metrics)
