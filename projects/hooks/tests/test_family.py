"""What every public hook must stand: two runs, a step that fails, and a resumed run.

Every attribute that a hook changes while it trains is in its state, or in the table of the documentation.
"""

import copy
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from fvcore.common.param_scheduler import CosineParamScheduler
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import sgd
from trainkit.checkpoint import Checkpointer
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer, hooks
from trainkit.engine.hooks import HOOK_REGISTRY, EvalHook, HookBase
from trainkit.engine.step import SimpleTrainer
from trainkit.solver import LRMultiplier
from trainkit.utils.env import seed_all_rng
from trainkit.utils.events import JSONWriter
from trainkit.utils.plugins import find_plugins

CLASSES = {name: value for name in hooks.__all__ if inspect.isclass(value := getattr(hooks, name))}
PUBLIC = sorted(
    name for name, value in CLASSES.items() if issubclass(value, HookBase) and value is not HookBase
)

MAKE = {  # the others need no arguments
    "AccumulationSchedule": lambda job: hooks.AccumulationSchedule([[2, 2]]),
    "AutogradProfiler": lambda job: hooks.AutogradProfiler([3, 4], job.folder, use_cuda=False),
    "BestCheckpointer": lambda job: hooks.BestCheckpointer(2, job.checkpointer, "top1"),
    "BestCheckpoints": lambda job: hooks.BestCheckpoints(2, job.checkpointer, "top1"),
    "CallbackHook": lambda job: hooks.CallbackHook(after_step=lambda trainer: None),
    "CheckFiniteLoss": lambda job: hooks.CheckFiniteLoss(2),
    "EMAHook": lambda job: hooks.EMAHook(0.5, begin=2, interval=2),
    "EarlyStopping": lambda job: hooks.EarlyStopping(2, "top1", patience=9),
    "EmptyCache": lambda job: hooks.EmptyCache(True, True, True),
    "EvalHook": lambda job: hooks.EvalHook(3, lambda: {"other": 1.0}),
    "FinalEvalHook": lambda job: hooks.FinalEvalHook(lambda: {"other": 1.0}),
    "Freeze": lambda job: hooks.Freeze("*weight", begin=2, end=4),
    "GarbageCollection": lambda job: hooks.GarbageCollection(2),
    "GradNorm": lambda job: hooks.GradNorm(2),
    "LRScheduler": lambda job: hooks.LRScheduler(job.optimizer, CosineParamScheduler(1.0, 0.5)),
    "ParamScheduler": lambda job: hooks.ParamScheduler("momentum", [{"NAME": "Cosine"}]),
    "PeriodicCheckpointer": lambda job: hooks.PeriodicCheckpointer(job.checkpointer, 2),
    "PeriodicWriter": lambda job: hooks.PeriodicWriter(
        [JSONWriter(job.folder / "metrics.json")], 2
    ),
    "PreciseBN": lambda job: hooks.PreciseBN(2, job.model, job.data, 2),
    "PublishWeights": lambda job: job.beside(
        hooks.PeriodicCheckpointer(job.checkpointer, 0), hooks.PublishWeights()
    ),
    "ReduceOnPlateau": lambda job: job.beside(
        hooks.LRScheduler(), hooks.ReduceOnPlateau(2, "top1", patience=0)
    ),
    "Throughput": lambda job: hooks.Throughput(2),
    "TimeLimit": lambda job: hooks.TimeLimit("1h"),
    "TorchMemoryStats": lambda job: hooks.TorchMemoryStats(2),
    "TorchProfiler": lambda job: hooks.TorchProfiler(lambda trainer: trainer.iter == 3, job.folder),
    "UnusedParameters": lambda job: hooks.UnusedParameters(2),
    "VisualizationHook": lambda job: hooks.VisualizationHook(
        lambda inputs, outputs: [], 1, job.folder
    ),
}


class Net(nn.Module):
    """Fails after ``fails_in`` forward passes; a batch is ``[N, 3]``."""

    fails_in = -1

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))

    def forward(self, batch):
        if self.fails_in == 0:
            self.fails_in = -1
            raise RuntimeError("no forward pass today")
        self.fails_in -= 1
        return self.layers(batch).square().mean()


class Job:
    """A trainer with one hook of a class beside an evaluation every second iteration."""

    def __init__(self, name, folder):
        self.folder = folder
        self.model = Net()
        self.optimizer = sgd(self.model, momentum=0.9)
        self.data = list(torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(1)))
        self.trainer = SimpleTrainer(self.model, self.data, self.optimizer)
        self.trainer.scheduler = LRMultiplier(self.optimizer, CosineParamScheduler(1.0, 0.5), 9)
        self.checkpointer = Checkpointer(self.model, folder, trainer=self.trainer)
        self.hook = MAKE[name](self) if name in MAKE else CLASSES[name]()
        self.beside(EvalHook(2, lambda: {"top1": 50.0 - abs(self.trainer.iter - 3)}), self.hook)
        self.trainer.register_hooks([self.hook])

    def beside(self, other, hook):
        self.trainer.register_hooks([other])
        return hook

    def train(self, start_iter, max_iter):
        self.trainer.train(start_iter, max_iter)
        assert self.trainer.status == "finished"
        assert self.trainer.iter == max_iter


@pytest.mark.parametrize("name", PUBLIC)
def test_a_hook_runs_twice_and_stands_a_step_that_fails(name, tmp_path):
    job = Job(name, tmp_path)
    job.train(0, 5)
    job.train(0, 5)
    job.train(5, 8)
    job.model.fails_in = 3
    with pytest.raises(RuntimeError, match="no forward pass today"):
        job.trainer.train(8, 14)
    assert job.trainer.status == "failed"
    job.train(job.trainer.iter, 14)


# what constructors of hooks need besides the argument that is tested
NEEDED = {
    "eval_period": 2,
    "eval_function": dict,
    "writers": [],
    "val_metric": "top1",
    "mode": "max",
    "period": 2,
    "num_iter": 2,
    "checkpointer": None,
    "model": nn.BatchNorm1d(3),
    "data_loader": [],
    "draw": lambda inputs, outputs: [],
    "param": "lr",
    "schedules": [{"NAME": "Cosine"}],
    "names": "*",
    "seconds": 1.0,
    "clustering": {"k": 2},
    "fix_pred_lr": True,
    "lr": 0.1,
    "batch_size": 2,
    "centroids_update_interval": 2,
    "deal_with_small_clusters_interval": 2,
    "evaluate_interval": 2,
}


def numbers_of_all_hooks():
    """(class, name of an argument, its annotation) for each number that a constructor of a hook takes."""
    modules = find_plugins().names.values()
    registered = {module for module in modules if module.endswith("hooks")}
    for module in [
        "trainkit_selfsup",
        *registered,
        *{type.__module__ for type in CLASSES.values()},
    ]:
        importlib.import_module(module)
    for name, hook_class in HOOK_REGISTRY:
        if hook_class.__module__.startswith("trainkit"):
            for argument in inspect.signature(hook_class).parameters.values():
                kind = getattr(argument.annotation, "__name__", str(argument.annotation))
                if kind in ("int", "float", "int | None", "float | None", "int | str"):
                    yield pytest.param(hook_class, argument, kind[:5], id=f"{name}.{argument.name}")


@pytest.mark.parametrize(("hook_class", "argument", "kind"), [*numbers_of_all_hooks()])
def test_a_number_out_of_its_range_is_an_error_that_names_the_argument(hook_class, argument, kind):
    parameters = inspect.signature(hook_class).parameters.values()
    needed = {p.name: NEEDED[p.name] for p in parameters if p.default is p.empty}
    wrong = [float("nan"), float("inf"), "much", -1]
    if kind == "int |" and "str" in str(argument.annotation):
        wrong.remove("much")  # a time such as 30min is accepted
    if kind.startswith("int"):
        wrong += [0.5, True]
    if hook_class is hooks.EarlyStopping and argument.name in ("threshold", "divergence"):
        wrong.remove(-1)  # a metric may be negative
    for value in wrong:
        with pytest.raises(ValueError, match=rf"{argument.name}\b.* must be .*got {value!r}"):
            hook_class(**{**needed, argument.name: value})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"NAME": "ReduceOnPlateau", "PATIENCE": -1}, "ReduceOnPlateau: patience must be .*>= 0"),
        ({"NAME": "ReduceOnPlateau", "FACTOR": 1.5}, r"factor must be a number in \[0, 1\)"),
        ({"NAME": "ReduceOnPlateau", "COOLDOWN": 0.5}, "cooldown must be a whole number >= 0"),
        ({"NAME": "EarlyStopping", "PATIENCE": 0}, "EarlyStopping: patience must be .*>= 1"),
        ({"NAME": "EarlyStopping", "MIN_DELTA": -0.1}, r"min_delta must be a number in \[0, inf"),
        ({"NAME": "PeriodicCheckpointer", "PERIOD": 0.5}, "PeriodicCheckpointer: period must be"),
        ({"NAME": "PeriodicCheckpointer", "START": -1}, "start must be a whole number >= 0"),
        ({"NAME": "PeriodicCheckpointer", "MAX_TO_KEEP": 0}, "max_to_keep .*must be .*>= 1"),
        ({"NAME": "TorchProfiler", "ENABLE_PREDICATE": [5, 5]}, "begin < end, got"),
        ({"NAME": "TorchProfiler", "ENABLE_PREDICATE": [5, 3]}, "begin < end, got"),
        ({"NAME": "TorchProfiler", "ENABLE_PREDICATE": [-1, 5]}, "enable_predicate must be"),
        ({"NAME": "SkipBatches", "RANGES": [[5, 3]]}, "ranges must be a list"),
        ({"NAME": "GarbageCollection", "GENERATION": 3}, "generation must be 0, 1 or 2, got 3"),
        ({"NAME": "AccumulationSchedule", "FACTORS": [[0, 0]]}, "factor must be .*>= 1, got 0"),
        (
            {"NAME": "ParamScheduler", "PARAM": "lr", "SCHEDULES": [{"NAME": "Step", "GAMMA": -1}]},
            r"ParamScheduler of lr\[0\] \(Step\) refuses .*GAMMA=-1",
        ),
    ],
    ids=str,
)
def test_a_wrong_number_in_the_config_is_found_before_the_training(entry, message, tmp_path):
    metric = {"VAL_METRIC": "classification/top1", "EVAL_PERIOD": 5, "MODE": "max"}
    if entry["NAME"] in ("ReduceOnPlateau", "EarlyStopping"):
        entry = {**metric, **entry}
    with pytest.raises(ConfigError, match=f"HOOKS: {entry['NAME']}.*{message}|{message}"):
        DefaultTrainer(tiny_cfg(tmp_path, "HOOKS", [entry]))


PAGE = (Path(__file__).parents[3] / "docs" / "exact_resume.md").read_text()
NOT_KEPT = {tuple(row) for row in re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE, re.MULTILINE)}
# what a hook only points to has a state of its own
OTHERS = {
    "trainer",
    "checkpointer",
    "_model",
    "_layers",
    "_writers",
    "_data_loader",
    "_optimizer",
    "_given_optimizer",
}
OTHERS |= {"_targets"}
# their states are for after_train, files, other ranks, a seed that was drawn, other schedules
SAME_WITHOUT = {
    "EvalHook",
    "FinalEvalHook",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "PreciseBN",
    "SyncBuffers",
}


def fingerprint(value):
    """Something that is equal for equal values of whatever a hook may hold."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.detach().tolist()
    if isinstance(value, dict):
        return {str(key): fingerprint(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [fingerprint(item) for item in value]
    if isinstance(value, str | int | float | bool | type(None)):
        return repr(value)
    if type(value).__module__.startswith("trainkit.projects") and not isinstance(value, HookBase):
        return fingerprint({name: item for name, item in vars(value).items() if name not in OTHERS})
    if hasattr(value, "state_dict") and not isinstance(value, HookBase):
        return fingerprint(value.state_dict())
    return type(value).__name__


class Snapshot(HookBase):
    """What a hook holds at its start and after every iteration, and what is saved after iteration 4."""

    def __init__(self, job):
        self.job, self.taken = job, {}

    def take(self):
        held = {name: item for name, item in vars(self.job.hook).items() if name not in OTHERS}
        return {name: fingerprint(item) for name, item in held.items()}

    def before_train(self):
        self.begin = self.take()

    def after_step(self):
        self.taken[self.trainer.iter] = self.take()
        if self.trainer.iter == 4:
            self.state = copy.deepcopy(self.trainer.state_dict())
            self.model = copy.deepcopy(self.job.model.state_dict())


def snapshots(name, folder, resume_from=None, without_hook=False):
    seed_all_rng(0)
    job = Job(name, folder)
    job.trainer.data_loader = job.data[:1]  # so that it does not matter where it stands
    snapshot = Snapshot(job)
    job.trainer.register_hooks([snapshot], priority="LOWEST")
    if resume_from is None:
        job.train(0, 9)
        return snapshot
    torch.save(resume_from.state, folder / "state.pth")
    state = torch.load(folder / "state.pth", weights_only=True)
    if without_hook:
        del state["hooks"][name]
    job.model.load_state_dict(resume_from.model)
    job.trainer.load_state_dict(state)
    job.train(5, 9)
    return snapshot


@pytest.mark.parametrize("name", PUBLIC)
def test_what_training_changes_is_resumed_from_a_file_or_in_the_table_and_a_missing_state_is_noticed(
    name, tmp_path
):
    whole = snapshots(name, tmp_path)
    resumed = snapshots(name, tmp_path, whole)
    changed = {
        key
        for taken in whole.taken.values()
        for key in taken
        if taken[key] != whole.begin.get(key, "absent")
    }
    not_kept = {attribute for hook, attribute in NOT_KEPT if hook == name}
    assert not_kept <= changed
    for iter in (5, 6, 7, 8):
        for key in changed - not_kept:
            assert resumed.taken[iter].get(key) == whole.taken[iter].get(key), (iter, key)
    if whole.state["hooks"].get(name) and name not in SAME_WITHOUT:
        fresh = snapshots(name, tmp_path, whole, without_hook=True)
        assert any(fresh.taken[iter] != whole.taken[iter] for iter in (5, 6, 7, 8))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "AccumulationSchedule",
            {"factors": [[10]]},
            r"list of \[iteration, factor\], .* got \[\[10\]\]",
        ),
        (
            "AccumulationSchedule",
            {"factors": [10, 2]},
            r"list of \[iteration, factor\], .* got \[10, 2\]",
        ),
        ("AutogradProfiler", {"enable_predicate": 5}, r"or \[begin, end\] in iterations, got 5"),
        ("TorchProfiler", {"enable_predicate": [5]}, r"or \[begin, end\] in iterations, got \[5\]"),
        ("EMAHook", {"decay": 1}, "decay .* got 1$"),
        ("EMAHook", {"buffers": "keep"}, "buffers must be .* got 'keep'"),
        ("Freeze", {"names": "a", "begin": 2, "end": 2}, "end must be .* got 2"),
        ("ParamScheduler", {"param": "lr", "schedules": [{"NAME": "Cosin"}]}, "Cosin"),
        ("PublishWeights", {"weights": "best"}, "got best"),
        (
            "ReduceOnPlateau",
            {"eval_period": 1, "val_metric": "loss", "factor": 1.0},
            "factor .* got .*1.0",
        ),
        (
            "ReduceOnPlateau",
            {"eval_period": 0, "val_metric": "loss"},
            "eval_period must be .* >= 1, got 0$",
        ),
        ("SyncBuffers", {"period": -1}, "period must be .* got -1"),
        ("Throughput", {"peak_tflops": 0}, "peak_tflops must be .* got 0"),
        ("VisualizationHook", {"draw": "nothing"}, "no 'nothing' in the VISUALIZER registry"),
        ("VisualizationHook", {"draw": print, "phases": "train"}, "phases must be .* got 'train'"),
    ],
)
def test_a_wrong_argument_is_an_error_of_the_constructor_that_names_it(name, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(hooks, name)(**arguments)


def test_a_profiler_of_iterations_after_the_end_warns(tmp_path, caplog):
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "SOLVER.MAX_ITER", 2))
    trainer.register_hooks([hooks.TorchProfiler([2, 5], tmp_path)])
    trainer.train()
    text = "TorchProfiler: enable_predicate is [2, 5], but the run has only 2 iterations"
    assert text in caplog.text
