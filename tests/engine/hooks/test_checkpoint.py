import itertools
import math
import shutil
from types import SimpleNamespace

import fvcore.common.checkpoint
import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep, Steps, Weight, fail_at, sgd, stop_at
from tests.two_ranks import on_two_ranks
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.config import LENGTH_KEYS, ConfigError, check_values, get_cfg, resolve_lengths
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import BestCheckpointer, CallbackHook, EvalHook, PeriodicCheckpointer
from trainkit.engine.hooks import checkpoint as checkpoint_module
from trainkit.engine.hooks.checkpoint import best_file_prefixes
from trainkit.engine.step import SimpleTrainer

BOTH = pytest.mark.parametrize(
    "checkpointer_class", [Checkpointer, fvcore.common.checkpoint.Checkpointer]
)


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "run_id")


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


@BOTH
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"period": 0}, ["model_final.pth"]),
        (
            {"period": 2, "max_to_keep": 2},
            ["model_0000005.pth", "model_0000007.pth", "model_final.pth"],
        ),
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
    assert state["iteration"] == 9
    assert state["trainer"]["iteration"] == 9
    assert state["model"]["weight"].item() == -4.0


@pytest.mark.parametrize(("unit", "per_unit"), [("", 1), ("ep", 3)])
@pytest.mark.parametrize(
    ("length", "options", "saved_after", "last"),
    [
        (21, {"SAVE_LAST": False}, [5, 10, 15, 20], ""),
        (20, {"MAX_TO_KEEP": 2}, [10, 15, 20], "model_final"),
        (20, {"START": 12, "SAVE_LAST": False}, [12, 17], ""),
    ],
)
def test_saves_every_5_of_a_run(tmp_path, unit, per_unit, length, options, saved_after, last):
    settings = {"SOLVER.MAX_ITER": length, "SOLVER.CHECKPOINT_PERIOD": 5}
    settings |= {f"CHECKPOINT.{key}": value for key, value in options.items()}
    cfg, trainer = get_cfg(), Steps()
    for key, value in settings.items():
        cfg.merge_from_list([key, f"{value}{unit}" if unit and key in LENGTH_KEYS else value])
    trainer.cfg = resolve_lengths(cfg, per_unit)
    arguments = PeriodicCheckpointer.config_arguments(trainer)
    trainer.register_hooks(
        [PeriodicCheckpointer(Checkpointer(nn.Linear(1, 1), tmp_path), **arguments)]
    )
    trainer.train(0, trainer.cfg.SOLVER.MAX_ITER)
    iterations = [done * per_unit - 1 for done in saved_after]
    names = [f"model_{iteration:07d}" for iteration in iterations]
    names[-1] = last or names[-1]
    left = sorted((load(path)["iteration"], path.stem) for path in tmp_path.glob("*.pth"))
    assert left == list(zip(iterations, names, strict=True))


@pytest.mark.parametrize(
    ("finished", "save_last", "at", "saved"),
    [
        (True, True, 2, [("model_0000001", 1), ("model_final", 2)]),
        (True, False, 2, [("model_0000001", 1)]),
        (False, True, 2, [("model_0000001", 1), ("model_0000002", 2)]),
        (False, True, 0, [("model_0000000", 0)]),
        # again, since the boundary of the update is over
        (
            False,
            True,
            1,
            2 * [("model_0000001", 1)],
        ),
    ],
)
def test_a_run_that_ends_early_is_saved_under_the_name_of_its_end(finished, save_last, at, saved):
    recorder = Recorder()
    Steps(
        [PeriodicCheckpointer(recorder, 2, save_last=save_last), stop_at(at, finished=finished)]
    ).train(0, 9)
    assert recorder.saved == saved


def test_a_periodic_save_that_fails_is_logged_and_the_run_goes_on_and_one_that_fails_is_not_saved(
    caplog,
):
    recorder = Recorder(full=[3])
    trainer = Steps([PeriodicCheckpointer(recorder, 2)])
    trainer.train(0, 7)
    assert trainer.status == "finished"
    assert recorder.saved == [("model_0000001", 1), ("model_0000005", 5), ("model_final", 6)]
    [text] = [text for text in caplog.messages if "'model_0000003'" in text]
    assert "not saved" in text
    assert text.endswith(": no space left")
    recorder = Recorder()
    with pytest.raises(RuntimeError):
        Steps([PeriodicCheckpointer(recorder, 2)], step=fail_at(3)).train(0, 4)
    assert recorder.saved == [("model_0000001", 1)]


def test_a_run_whose_folder_is_deleted_names_each_save_that_fails_and_fails_at_its_end(
    tmp_path, caplog
):
    folder = tmp_path / "run"
    checkpointer = Checkpointer(nn.Linear(1, 1), folder)
    delete = CallbackHook(after_step=lambda trainer: trainer.iter == 2 and shutil.rmtree(folder))
    trainer = Steps([PeriodicCheckpointer(checkpointer, 2), delete])
    with pytest.raises(CheckpointError, match="model_final.pth"):
        trainer.train(0, 7)
    assert trainer.status == "failed"
    not_saved = [text for text in caplog.messages if "training continues" in text]
    assert [text.split("'")[1] for text in not_saved] == [
        "model_0000003",
        "model_0000005",
        "model_final",
    ]
    assert not folder.exists()


@pytest.mark.parametrize(
    ("period", "kept"),
    [(0, ["model_0000004.pth"]), (2, ["model_0000003.pth", "model_0000004.pth"])],
)
def test_a_run_that_is_stopped_is_saved_where_it_stands_and_counts_in_the_rotation(
    tmp_path, save_format, period, kept
):
    def make(*hooks):
        trainer = Steps()
        checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path, format=save_format, trainer=trainer)
        trainer.register_hooks([PeriodicCheckpointer(checkpointer, period, max_to_keep=2), *hooks])
        return trainer, checkpointer

    trainer, _ = make(stop_at(4))
    trainer.train(0, 9)
    assert trainer.status == "stopped"
    assert files(tmp_path) == ["last_checkpoint", *kept]
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000004.pth"
    assert load(tmp_path / "model_0000004.pth")["iteration"] == 4
    trainer, checkpointer = make()
    checkpointer.resume_or_load("")
    trainer.train(trainer.iter + 1, 9)
    assert trainer.status == "finished"
    assert trainer.start_iter == 5


@pytest.mark.parametrize(
    ("failing", "save_last", "length"), [("model_final", True, 5), ("model_0000005", False, 6)]
)
def test_a_run_whose_last_save_fails_has_failed(tmp_path, save_format, failing, save_last, length):
    (tmp_path / f"{failing}.pth").mkdir()  # nothing can be renamed to that
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path, format=save_format)
    trainer = Steps([PeriodicCheckpointer(checkpointer, 2, save_last=save_last)])
    with pytest.raises(CheckpointError, match=rf"cannot write .*{failing}\.pth"):
        trainer.train(0, length)
    assert trainer.status == "failed"
    assert trainer.iter == length
    (tmp_path / f"{failing}.pth").rmdir()
    trainer.train(0, length)  # the same trainer and hooks, and nothing is left of the failure
    assert trainer.status == "finished"


@pytest.mark.parametrize(
    ("values", "mode", "expected", "best"),
    [
        ([50.0, 70.0, 70.0, 60.0, 80.0], "auto", [1, 3, 9], "80"),
        ([3.0, 2.0, 2.5, 1.0], "min", [1, 3, 7], "1"),
        ([math.nan, math.inf, 50.0, -math.inf, math.nan, 60.0, 40.0], "max", [5, 11], "60"),
    ],
)
def test_each_best_value_is_saved_and_a_value_that_is_not_finite_never_is(
    values, mode, expected, best, caplog
):
    caplog.set_level("INFO")
    recorder, results = Recorder(), iter(values)
    trainer = Steps(
        [EvalHook(2, lambda: {"top1": next(results)}), BestCheckpointer(2, recorder, "top1", mode)]
    )
    trainer.train(0, 2 * len(values))  # the last evaluation is after training
    assert recorder.saved == [("model_best", iteration) for iteration in expected]
    direction = "min" if mode == "min" else "max"
    assert f"top1 is {best}, the best so far ({direction})" in caplog.text


def test_a_best_value_counts_only_if_its_file_is_there():
    recorder, best = Recorder(full=[1]), []
    results = iter([50.0, 80.0, 70.0, 60.0])
    trainer = Steps(
        [EvalHook(1, lambda: {"top1": next(results)}), BestCheckpointer(1, recorder, "top1")]
    )
    note = CallbackHook(
        before_step=lambda t: best.append(t.state_dict()["hooks"]["BestCheckpointer"]["best"])
    )
    trainer.register_hooks([note])
    trainer.train(0, 4)
    assert trainer.status == "finished"
    assert best == [None, 50.0, 50.0, 70.0]  # of 80 there is no file
    assert recorder.saved == [("model_best", 0), ("model_best", 2)]


@BOTH
def test_the_best_value_is_remembered_over_a_resume_and_last_checkpoint_stays(
    tmp_path, checkpointer_class
):
    def make(values, *more):
        trainer, results = Steps(), iter(values)
        checkpointer = checkpointer_class(nn.Linear(1, 1), str(tmp_path), trainer=trainer)
        evaluate = EvalHook(2, lambda: {"top1": next(results)})
        trainer.register_hooks([*more, evaluate, BestCheckpointer(2, checkpointer, "top1")])
        trainer.register_hooks([PeriodicCheckpointer(checkpointer, 4)])
        return trainer, checkpointer

    tags = []
    first, _ = make(
        [50.0, 80.0, 70.0],
        AfterStep(lambda trainer: tags.append((tmp_path / "last_checkpoint").exists())),
    )
    first.train(0, 6)
    assert tags == [False] * 4 + [True] * 2  # a best save is no last one
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"
    assert load(tmp_path / "model_best.pth")["iteration"] == 3

    # the first is that of iteration 5 again, which is no longer the last one
    second, checkpointer = make([70.0, 75.0, 79.0, 81.0])
    checkpointer.resume_or_load("", resume=True)
    assert second.iter == 5
    best = []
    second.register_hooks(
        [AfterStep(lambda trainer: best.append(load(tmp_path / "model_best.pth")["iteration"]))]
    )
    second.train(6, 12)
    assert best == [3] * 6
    assert load(tmp_path / "model_best.pth")["iteration"] == 11
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"


def test_a_missing_metric_is_an_error_with_the_nearest_name_and_two_hooks_for_one_file_are_one_too():
    hooks = [
        EvalHook(1, lambda: {"cls": {"top1": 1, "loss": 2}}),
        BestCheckpointer(1, Recorder(), "cls/top_1"),
    ]
    with pytest.raises(
        ValueError, match=r"'cls/top_1'; did you mean 'cls/top1'\? known are: cls/loss, cls/top1"
    ):
        Steps(hooks).train(0, 2)
    prefixes = best_file_prefixes(["a/b", "a_b"])
    hooks = [
        BestCheckpointer(1, Recorder(), metric, "max", prefix)
        for metric, prefix in prefixes.items()
    ]
    with pytest.raises(ConfigError, match="two hooks have the file_prefix 'model_best_a_b'"):
        Steps(hooks).train(0, 1)


def test_each_of_several_metrics_has_a_file_and_of_another_metric_or_mode_no_best_value_is_taken_over(
    caplog,
):
    prefixes = best_file_prefixes(["a/top1", "a/loss"])
    assert prefixes == {"a/top1": "model_best_a_top1", "a/loss": "model_best_a_loss"}
    assert (
        best_file_prefixes("a/top1") == best_file_prefixes(["a/top1"]) == {"a/top1": "model_best"}
    )
    assert best_file_prefixes(None) == best_file_prefixes("") == best_file_prefixes([]) == {}

    def make(results, modes=("auto", "auto"), metrics=("a/top1", "a/loss")):
        recorder = Recorder()
        pairs = zip(metrics, modes, prefixes.values(), strict=True)
        best = [
            BestCheckpointer(1, recorder, metric, mode, prefix) for metric, mode, prefix in pairs
        ]
        evaluate = EvalHook(
            1, lambda: {"a": dict(zip(("top1", "loss"), results.pop(0), strict=True))}
        )
        return Steps([evaluate, *best]), recorder

    first, recorder = make([(50, 3.0), (60, 4.0), (55, 2.0)])
    first.train(0, 3)
    assert dict(recorder.saved) == {"model_best_a_loss": 2, "model_best_a_top1": 1}
    second, recorder = make([(58, 1.0), (59, 5.0)])
    second.load_state_dict(first.state_dict())
    second.train(3, 5)
    assert recorder.saved == [("model_best_a_loss", 3)]
    assert caplog.messages == []
    for other in ({"modes": ("min", "auto")}, {"metrics": ("a/loss", "a/top1")}):
        second, recorder = make([(58, 5.0)], **other)
        second.load_state_dict(first.state_dict())
        second.train(3, 4)
        assert ("model_best_a_top1", 3) in recorder.saved
    ignored = [text for text in caplog.messages if "BestCheckpointer is ignored" in text]
    assert len(ignored) >= 2


class Clock:
    """A step takes ``step_sec`` seconds."""

    def __init__(self, monkeypatch, step_sec):
        self.now = 1000.0
        self.step_sec = step_sec
        monkeypatch.setattr(checkpoint_module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def step(self, iter):
        self.now += self.step_sec


@pytest.mark.parametrize(
    ("period", "saved"),
    [
        # steps of 700 s: 1800 s are over after the third one
        ("30min", [2, 5, 8]),
        ("1h 10min", [5]),
        ("699s", [*range(9)]),
        ("1d", []),
    ],
)
def test_a_period_in_time_counts_from_the_last_save(monkeypatch, period, saved):
    clock, recorder = Clock(monkeypatch, 700.0), Recorder()
    trainer = Steps([PeriodicCheckpointer(recorder, period)], step=clock.step)
    trainer.train(0, 10)
    names = [(f"model_{iter:07d}", iter) for iter in saved]
    assert recorder.saved == [*names, ("model_final", 9)]


def test_a_run_that_goes_on_saves_after_a_whole_period_and_none_twice(monkeypatch):
    clock, recorder = Clock(monkeypatch, 700.0), Recorder()
    trainer = Steps([PeriodicCheckpointer(recorder, "30min"), stop_at(2)], step=clock.step)
    trainer.train(0, 10)
    assert {*recorder.saved} == {("model_0000002", 2)}  # due and stopped in one iteration
    clock.now += 10**6  # between the two processes
    recorder = Recorder()
    again = Steps([PeriodicCheckpointer(recorder, "30min")], step=clock.step)
    again.load_state_dict(trainer.state_dict())
    again.train(3, 10)
    assert recorder.saved == [("model_0000005", 5), ("model_0000008", 8), ("model_final", 9)]


def test_the_rotation_counts_saves_of_a_period_in_time(monkeypatch, tmp_path):
    clock = Clock(monkeypatch, 700.0)
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path)
    hook = PeriodicCheckpointer(checkpointer, "20min", max_to_keep=2)
    Steps([hook], step=clock.step).train(0, 9)
    assert [path.name for path in sorted(tmp_path.glob("*.pth"))] == [
        "model_0000005.pth",
        "model_0000007.pth",
        "model_final.pth",
    ]


@pytest.mark.parametrize(("text", "resolved"), [("30min", "30min"), ("2ep", 20)])
def test_a_config_takes_a_period_in_time_beside_iterations_and_epochs(text, resolved):
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.CHECKPOINT_PERIOD", text])
    check_values(cfg)
    assert resolved == resolve_lengths(cfg, 10).SOLVER.CHECKPOINT_PERIOD


@pytest.mark.parametrize("text", ["30 minutes", "0s"])
def test_a_period_in_another_unit_is_an_error(text):
    with pytest.raises(ConfigError, match="CHECKPOINT_PERIOD: got .* or a time"):
        get_cfg().merge_from_list(["SOLVER.CHECKPOINT_PERIOD", text])


def test_a_period_in_time_is_for_checkpoints_from_the_start_on(tmp_path):
    with pytest.raises(ConfigError, match="LOG.PERIOD: got '30min' .*accepted: iterations"):
        get_cfg().merge_from_list(["LOG.PERIOD", "30min"])
    cfg = tiny_cfg(tmp_path, "SOLVER.CHECKPOINT_PERIOD", "30min", "CHECKPOINT.START", 5)
    with pytest.raises(ConfigError, match="PeriodicCheckpointer: start must be 0 if the period is"):
        DefaultTrainer(cfg)
    cfg = tiny_cfg(tmp_path, "SOLVER.CHECKPOINT_PERIOD", "1d")
    DefaultTrainer(cfg).train()
    assert [path.name for path in tmp_path.glob("*.pth")] == ["model_final.pth"]


def saves_by_the_clock_of_rank_0(rank, folder):
    """Rank 1 has a clock that runs three times as fast."""
    clock = SimpleNamespace(now=0.0)
    checkpoint_module.time = SimpleNamespace(monotonic=lambda: clock.now)

    def step(iter):
        clock.now += 100.0 * (1 + 2 * rank)

    recorder = Recorder()
    trainer = Steps([PeriodicCheckpointer(recorder, "10min")], step=step)
    trainer.stop_check_period = 4
    trainer.train(0, 31)
    return [iter for _, iter in recorder.saved]


@pytest.mark.slow
def test_all_ranks_save_in_the_same_iteration_by_the_clock_of_rank_0(tmp_path):
    checks = [saves_by_the_clock_of_rank_0]
    [found, of_rank_1] = on_two_ranks(checks, tmp_path)["saves_by_the_clock_of_rank_0"]
    assert found == of_rank_1
    # 600 s are 6 steps; the ranks exchange after every second step, and read at the next time
    assert found[-1] == 30
    gaps = [after - before for before, after in itertools.pairwise([-1, *found[:-1]])]
    assert len(gaps) >= 3
    assert all(6 <= gap <= 6 + 4 for gap in gaps)
