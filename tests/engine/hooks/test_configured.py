"""HOOKS of a config."""

import logging

import pytest

from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer, EvaluationRun, HookBase, hooks
from trainkit.engine.hooks import HOOK_REGISTRY
from trainkit.utils.plugins import find_plugins

DEFAULT_ORDER = [
    "IterationTimer",
    "LRScheduler",
    "PeriodicCheckpointer",
    "EvalHook",
    "PeriodicWriter",
]


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


def trainer(tmp_path, *entries, **options):
    pairs = [item for pair in options.items() for item in pair]
    return DefaultTrainer(tiny_cfg(tmp_path, "HOOKS", list(entries), *pairs))


def order(trainer):
    return [
        name
        for hook in trainer.hooks
        if (name := type(hook).__name__) not in find_plugins().run_hooks
    ]


def test_hooks_of_the_users_own_get_their_arguments_and_stand_in_their_order_before_the_checkpointer(
    tmp_path,
):
    own = {"NAME": "Recorder", "PERIOD": 3, "NAMES": ["x", "y"]}
    job = trainer(
        tmp_path, own, {"NAME": "TorchMemoryStats"}, {"NAME": "NeedsThings", "SCALE": 2.5}
    )
    expected = ["Recorder", "TorchMemoryStats", "NeedsThings"]
    assert order(job) == ["IterationTimer", "LRScheduler", *expected, *DEFAULT_ORDER[2:]]
    [recorder] = [hook for hook in job.hooks if isinstance(hook, Recorder)]
    [hook] = [hook for hook in job.hooks if isinstance(hook, NeedsThings)]
    assert recorder.period == 3
    assert recorder.names == ["x", "y"]
    assert hook.scale == 2.5
    parts = (job.model, job.checkpointer, job.cfg, job.optimizer, job.data_loader)
    assert all(got is wanted for got, wanted in zip(hook.things, parts, strict=True))
    for priority, place in (("HIGH", 1), (56, 3), (100, 4)):
        expected = [*DEFAULT_ORDER[:place], "Recorder", *DEFAULT_ORDER[place:]]
        assert order(trainer(tmp_path, {"NAME": "Recorder", "PRIORITY": priority})) == expected


def test_a_default_hook_keeps_its_place_and_its_other_arguments_when_an_entry_changes_one(tmp_path):
    job = trainer(
        tmp_path,
        {"NAME": "PeriodicCheckpointer", "PERIOD": 4},
        {"NAME": "IterationTimer", "WARMUP_ITER": 0},
    )
    assert order(job) == DEFAULT_ORDER
    job.train()
    files = sorted(path.name for path in tmp_path.glob("*.pth"))
    assert files == ["model_0000003.pth", "model_0000007.pth", "model_final.pth"]
    assert [iter for _, iter in job.storage.history("time").values()] == list(range(10))


def test_every_default_hook_can_be_switched_off(tmp_path):
    for name in DEFAULT_ORDER:
        job = trainer(tmp_path / name, {"NAME": name, "ENABLED": False})
        assert order(job) == [other for other in DEFAULT_ORDER if other != name]
        job.train()
    best = {"CHECKPOINT.BEST_METRIC": ["classification/top1", "classification/mean_class_accuracy"]}
    mine = {"NAME": "BestCheckpointer", "VAL_METRIC": "loss", "FILE_PREFIX": "mine"}
    job = trainer(tmp_path, mine, **best)  # those of the config and of entries add up
    prefixes = [hook.file_prefix for hook in job.hooks if isinstance(hook, hooks.BestCheckpointer)]
    of_config = ["model_best_classification_top1", "model_best_classification_mean_class_accuracy"]
    assert prefixes == ["mine", *of_config]
    assert (
        order(trainer(tmp_path, {"NAME": "BestCheckpointer", "ENABLED": False}, **best))
        == DEFAULT_ORDER
    )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"PERIOD": 3}, r"HOOKS is a list of entries"),
        (
            {"NAME": "Recoder"},
            r"HOOKS: no 'Recoder' in the HOOK registry; did you mean 'Recorder'\? .*IMPORTS",
        ),
        ({"NAME": "Recorder", "PERIODS": 2}, r"HOOKS: Recorder: .*'periods'"),
        ({"NAME": "Recorder", "PERIOD": 0}, r"HOOKS: Recorder: period must be >= 1, got 0"),
        ({"NAME": "NeedsThings"}, r"HOOKS: NeedsThings: .*scale"),
        (
            {"NAME": "Recorder", "PRIORITY": "FIRST"},
            r"HOOKS: Recorder: priority must be .*got 'FIRST'",
        ),
    ],
)
def test_a_wrong_entry_is_named_before_training(entry, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, entry)


def test_a_trainer_that_builds_its_hooks_alone_is_told_which_entries_it_leaves_out(
    tmp_path, caplog
):
    class Own(DefaultTrainer):
        def build_hooks(self):
            return [hooks.IterationTimer()]

    with caplog.at_level(logging.WARNING):
        job = Own(tiny_cfg(tmp_path, "HOOKS", [{"NAME": "Recorder"}]))
    assert order(job) == ["IterationTimer"]
    assert "build_hooks() has not used Recorder" in caplog.text


@HOOK_REGISTRY.register()
class OnTheObject(HookBase):
    def __init__(self, model, **others):
        self.after_eval = lambda phase, name, results: None


@HOOK_REGISTRY.register()
class WithOptimizer(HookBase):
    def __init__(self, optimizer):
        pass

    def after_eval(self, phase, name, results):
        pass


def test_without_training_hooks_that_need_a_part_of_it_are_left_out(tmp_path, caplog):
    names = ["OnTheObject", "EmptyCache", "Recorder", "EvalHook", "WithOptimizer"]
    entries = [{"NAME": name} for name in names]
    assert order(trainer(tmp_path, entries[-1]))[2] == "WithOptimizer"
    with caplog.at_level(logging.INFO):
        run = EvaluationRun(tiny_cfg(tmp_path, "HOOKS", entries), DefaultTrainer)
    assert order(run) == ["OnTheObject", "EmptyCache"]
    assert any(text.startswith("HOOKS: WithOptimizer is left out") for text in caplog.messages)
    off = {"NAME": "EmptyCache", "ENABLED": False}
    options = ("HOOKS", [off], "TEST.PRECISE_BN.ENABLED", True)
    assert order(EvaluationRun(tiny_cfg(tmp_path, *options), DefaultTrainer)) == []


def test_a_wrong_argument_of_a_hook_is_answered_by_those_that_it_takes(tmp_path):
    cfg = tiny_cfg(tmp_path, "HOOKS", [{"NAME": "EMAHook", "UPDATE_BUFFERS": True}])
    with pytest.raises(ConfigError, match=r"EMAHook: .*update_buffers.*; accepted: .*DECAY, "):
        DefaultTrainer(cfg)
