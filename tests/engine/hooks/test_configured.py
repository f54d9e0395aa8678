"""HOOKS of a config."""

import logging
import re

import pytest

from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer, EvaluationRun, HookBase, hooks
from trainkit.engine.hooks import HOOK_REGISTRY
from trainkit.utils.plugins import RUN_HOOKS

DEFAULT_ORDER = ["IterationTimer", "LRScheduler", "PeriodicCheckpointer", "EvalHook", "PeriodicWriter"]


@HOOK_REGISTRY.register()
class Recorder(HookBase):
    def __init__(self, period=1, names=("a",)):
        if period < 1:
            raise ValueError(f"period must be >= 1, got {period}")
        self.period, self.names, self.calls = period, names, []

    def after_step(self):
        self.calls.append(self.trainer.iter)


@HOOK_REGISTRY.register()
class NeedsThings(HookBase):
    def __init__(self, model, checkpointer, cfg, optimizer, data_loader, scale):
        self.things = (model, checkpointer, cfg, optimizer, data_loader)
        self.scale = scale


def trainer(tmp_path, *entries):
    return DefaultTrainer(tiny_cfg(tmp_path, "HOOKS", list(entries)))


def order(trainer):
    return [name for hook in trainer._hooks if (name := type(hook).__name__) not in RUN_HOOKS]


def only(trainer, hook_class):
    (hook,) = [hook for hook in trainer._hooks if isinstance(hook, hook_class)]
    return hook


def error(tmp_path, *entries):
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, *entries)
    return str(caught.value)


def test_without_entries_the_default_hooks_are_there(tmp_path):
    assert order(trainer(tmp_path)) == DEFAULT_ORDER


def test_a_hook_of_the_users_own_gets_its_arguments_and_stands_before_the_checkpointer(tmp_path):
    job = trainer(tmp_path, {"NAME": "Recorder", "PERIOD": 3, "NAMES": ["x", "y"]})
    assert order(job) == ["IterationTimer", "LRScheduler", "Recorder", *DEFAULT_ORDER[2:]]
    recorder = only(job, Recorder)
    assert (recorder.period, recorder.names) == (3, ["x", "y"])
    job.train(max_iter=2)
    assert recorder.calls == [0, 1]


def test_entries_keep_their_order(tmp_path):
    job = trainer(tmp_path, {"NAME": "Recorder", "PERIOD": 2}, {"NAME": "TorchMemoryStats"}, {"NAME": "Recorder"})
    assert order(job)[2:5] == ["Recorder", "TorchMemoryStats", "Recorder"]
    assert [hook.period for hook in job._hooks if isinstance(hook, Recorder)] == [2, 1]


def test_a_default_hook_keeps_its_place_and_its_other_arguments_when_an_entry_changes_one(tmp_path):
    job = trainer(tmp_path, {"NAME": "PeriodicCheckpointer", "PERIOD": 4}, {"NAME": "IterationTimer", "WARMUP_ITER": 0})
    assert order(job) == DEFAULT_ORDER
    job.train()
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == [
        "model_0000003.pth",
        "model_0000007.pth",
        "model_final.pth",
    ]
    assert [iter for _, iter in job.storage.history("time").values()] == list(range(10))


@pytest.mark.parametrize("name", DEFAULT_ORDER)
def test_every_default_hook_can_be_switched_off(tmp_path, name):
    job = trainer(tmp_path, {"NAME": name, "ENABLED": False})
    assert order(job) == [other for other in DEFAULT_ORDER if other != name]
    job.train()


def test_the_best_checkpoints_of_the_config_can_be_switched_off_by_an_entry(tmp_path):
    best = ("CHECKPOINT.BEST_METRIC", ["classification/top1", "classification/mean_class_accuracy"])
    with_them = DefaultTrainer(tiny_cfg(tmp_path, *best))
    assert order(with_them) == [*DEFAULT_ORDER[:4], "BestCheckpointer", "BestCheckpointer", "PeriodicWriter"]
    without = DefaultTrainer(tiny_cfg(tmp_path, *best, "HOOKS", [{"NAME": "BestCheckpointer", "ENABLED": False}]))
    assert order(without) == DEFAULT_ORDER


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ({"PRIORITY": "HIGH"}, ["IterationTimer", "Recorder", *DEFAULT_ORDER[1:]]),
        ({"PRIORITY": 100}, [*DEFAULT_ORDER[:4], "Recorder", "PeriodicWriter"]),
        ({"BEFORE": "EvalHook"}, [*DEFAULT_ORDER[:3], "Recorder", *DEFAULT_ORDER[3:]]),
        ({"AFTER": "EvalHook"}, [*DEFAULT_ORDER[:4], "Recorder", "PeriodicWriter"]),
        ({"AFTER": "PeriodicWriter"}, [*DEFAULT_ORDER, "Recorder"]),
    ],
)
def test_an_entry_says_where_its_hook_stands(tmp_path, place, expected):
    assert order(trainer(tmp_path, {"NAME": "Recorder", **place})) == expected


def test_with_validation_data_each_evaluation_has_a_name_of_its_own_for_anchors(tmp_path):
    entries = [{"NAME": "Recorder", "AFTER": "EvalHook"}, {"NAME": "Recorder", "AFTER": "FinalEvalHook"}]
    job = DefaultTrainer(tiny_cfg(tmp_path, "HOOKS", entries, "DATASETS.VAL", ("tiny_val",)))
    assert order(job)[3:] == ["EvalHook", "Recorder", "FinalEvalHook", "Recorder", "PeriodicWriter"]
    job.register_hooks([Recorder()], before=hooks.EvalHook)
    assert order(job)[3:5] == ["Recorder", "EvalHook"]


def test_without_the_hook_that_steps_the_schedule_there_is_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path, {"NAME": "LRScheduler", "ENABLED": False})
    assert "the learning rate stays at its first value (0.0001)" in caplog.text
    caplog.clear()
    trainer(tmp_path)
    assert "LRScheduler" not in caplog.text


def test_required_arguments_that_the_trainer_has_are_taken_from_it(tmp_path):
    job = trainer(tmp_path, {"NAME": "NeedsThings", "SCALE": 2.5})
    hook = only(job, NeedsThings)
    expected = (job.model, job.checkpointer, job.cfg, job.optimizer, job.data_loader)
    assert all(got is wanted for got, wanted in zip(hook.things, expected, strict=True))
    assert hook.scale == 2.5


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("Recorder", r"HOOKS is a list of entries such as .* got 'Recorder'"),
        ({"PERIOD": 3}, r"HOOKS is a list of entries"),
        ({"NAME": "Recoder"}, r"HOOKS: no 'Recoder' in the HOOK registry; did you mean 'Recorder'\? .*IMPORTS"),
        (
            {"NAME": "Recorder", "PERIODS": 2},
            r"Recorder: arguments: unknown 'PERIODS'; did you mean 'PERIOD'\? accepted: NAMES, PERIOD",
        ),
        ({"NAME": "Recorder", "PRIORITY": True}, r"HOOKS: Recorder: priority must be .*got True"),
        ({"NAME": "Recorder", "PERIOD": 0}, r"HOOKS: Recorder: period must be >= 1, got 0"),
        ({"NAME": "NeedsThings"}, r"HOOKS: NeedsThings: .*scale"),
        ({"NAME": "Recorder", 5: 1}, r"HOOKS is a list of entries such as .* got {'NAME': 'Recorder', 5: 1}"),
        (
            {"NAME": "Recorder", "PRIORITY": 1, "BEFORE": "EvalHook"},
            r"Recorder: register_hooks\(\) takes one of priority, before and after",
        ),
        ({"NAME": "Recorder", "PRIORITY": "FIRST"}, r"HOOKS: Recorder: priority must be .*got 'FIRST'"),
        ({"NAME": "Recorder", "BEFORE": "EvalHok"}, r"HOOKS: Recorder: the anchor 'EvalHok' matches 0 hooks"),
        ({"NAME": "Recorder", "AFTER": "Recorder"}, r"HOOKS: Recorder: the anchor 'Recorder' matches 0 hooks"),
    ],
)
def test_a_wrong_entry_is_named_with_its_remedy_before_training(tmp_path, entry, message):
    assert re.search(message, error(tmp_path, entry))


def test_a_trainer_that_builds_its_hooks_alone_is_told_which_entries_it_leaves_out(tmp_path, caplog):
    class Own(DefaultTrainer):
        def build_hooks(self):
            return [hooks.IterationTimer()]

    with caplog.at_level(logging.WARNING):
        job = Own(tiny_cfg(tmp_path, "HOOKS", [{"NAME": "Recorder"}]))
    assert order(job) == ["IterationTimer"]
    assert "build_hooks() has not used Recorder" in caplog.text


@HOOK_REGISTRY.register()
class OnTheObject(HookBase):
    def __init__(self, model):
        self.after_eval = lambda phase, name, results: None


@HOOK_REGISTRY.register()
def called_back():
    return hooks.CallbackHook(before_eval=lambda trainer, phase, name: None)


@HOOK_REGISTRY.register()
class WithOptimizer(HookBase):
    def __init__(self, optimizer):
        pass

    def after_eval(self, phase, name, results):
        pass


@pytest.mark.parametrize(
    ("entry", "point"),
    [
        ({"NAME": "OnTheObject"}, "after_eval"),
        ({"NAME": "called_back"}, "before_eval"),
        ({"NAME": "EmptyCache"}, "after_eval"),
        ({"NAME": "EmptyCache", "AFTER_EPOCH": False}, None),
        ({"NAME": "EmptyCache", "ENABLED": False}, None),
        ({"NAME": "Recorder"}, None),
        ({"NAME": "EvalHook", "EVAL_PERIOD": 3}, None),
    ],
    ids=str,
)
def test_what_acts_on_an_evaluation_is_there_without_training_wherever_it_says_so(tmp_path, entry, point):
    run = EvaluationRun(tiny_cfg(tmp_path, "HOOKS", [entry]), DefaultTrainer)
    assert len(run._hooks) == (point is not None)
    assert (f"  {point} " in run.describe_hooks()) == (point is not None)


def test_what_asks_for_the_optimizer_is_left_out_without_training_and_the_log_says_so(tmp_path, caplog):
    assert order(trainer(tmp_path, {"NAME": "WithOptimizer"})) == [
        *DEFAULT_ORDER[:2],
        "WithOptimizer",
        *DEFAULT_ORDER[2:],
    ]
    with caplog.at_level(logging.INFO):
        assert EvaluationRun(tiny_cfg(tmp_path, "HOOKS", [{"NAME": "WithOptimizer"}]), DefaultTrainer)._hooks == []
    assert "HOOKS: WithOptimizer are left out, since they need a part of the training" in caplog.messages
