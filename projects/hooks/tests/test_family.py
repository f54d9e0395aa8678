"""What every public hook must stand: two runs, a step that fails, and a round trip of its state."""

import inspect

import pytest
import torch
from fvcore.common.param_scheduler import CosineParamScheduler
from torch import nn
from trainkit.projects.hooks.accumulation import AccumulationSchedule

from tests.engine.tiny import sgd
from trainkit.checkpoint import Checkpointer
from trainkit.engine import hooks
from trainkit.engine.hooks import EvalHook, HookBase
from trainkit.engine.step import SimpleTrainer
from trainkit.solver import LRMultiplier
from trainkit.utils.events import JSONWriter

PUBLIC = sorted(
    name
    for name, value in ((name, getattr(hooks, name)) for name in hooks.__all__)
    if inspect.isclass(value) and issubclass(value, HookBase) and value is not HookBase
)

MAKE = {
    "AccumulationSchedule": lambda job: AccumulationSchedule([[2, 2]]),
    "AutogradProfiler": lambda job: hooks.AutogradProfiler(
        lambda trainer: trainer.iter == 3, job.folder, use_cuda=False
    ),
    "BestCheckpointer": lambda job: hooks.BestCheckpointer(2, job.checkpointer, "top1"),
    "BestCheckpoints": lambda job: hooks.BestCheckpoints(2, job.checkpointer, "top1"),
    "CallbackHook": lambda job: hooks.CallbackHook(after_step=lambda trainer: None),
    "CheckFiniteLoss": lambda job: hooks.CheckFiniteLoss(2),
    "CopyAhead": lambda job: hooks.CopyAhead(),
    "EMAHook": lambda job: hooks.EMAHook(0.5, begin=2, interval=2),
    "EarlyStopping": lambda job: hooks.EarlyStopping(2, "top1", patience=9),
    "EmptyCache": lambda job: hooks.EmptyCache(True, True, True),
    "EvalHook": lambda job: hooks.EvalHook(3, lambda: {"other": 1.0}),
    "FinalEvalHook": lambda job: hooks.FinalEvalHook(lambda: {"other": 1.0}),
    "Freeze": lambda job: hooks.Freeze("*weight", begin=2, end=4),
    "GarbageCollection": lambda job: hooks.GarbageCollection(2),
    "GradNorm": lambda job: hooks.GradNorm(2),
    "IterationTimer": lambda job: hooks.IterationTimer(),
    "LRScheduler": lambda job: hooks.LRScheduler(job.optimizer, CosineParamScheduler(1.0, 0.5)),
    "MemorySnapshot": lambda job: hooks.MemorySnapshot(),
    "ParamScheduler": lambda job: hooks.ParamScheduler("momentum", [{"NAME": "Cosine"}]),
    "PeriodicCheckpointer": lambda job: hooks.PeriodicCheckpointer(job.checkpointer, 2),
    "PeriodicWriter": lambda job: hooks.PeriodicWriter([JSONWriter(job.folder / "metrics.json")], 2),
    "PreciseBN": lambda job: hooks.PreciseBN(2, job.model, job.data, 2),
    "PublishWeights": lambda job: job.with_checkpoints(hooks.PublishWeights()),
    "ReduceOnPlateau": lambda job: reduce_on_plateau(job),
    "RuntimeInfo": lambda job: hooks.RuntimeInfo(),
    "SamplerSeed": lambda job: hooks.SamplerSeed(),
    "SyncBuffers": lambda job: hooks.SyncBuffers(),
    "Throughput": lambda job: hooks.Throughput(2),
    "TimeLimit": lambda job: hooks.TimeLimit("1h"),
    "TorchMemoryStats": lambda job: hooks.TorchMemoryStats(2),
    "TorchProfiler": lambda job: hooks.TorchProfiler(
        lambda trainer: trainer.iter == 3, job.folder, activities=[torch.profiler.ProfilerActivity.CPU]
    ),
    "UnusedParameters": lambda job: hooks.UnusedParameters(2),
    "VisualizationHook": lambda job: hooks.VisualizationHook(lambda inputs, outputs: [], 1, job.folder),
}


def reduce_on_plateau(job):
    job.trainer.scheduler = LRMultiplier(job.optimizer, CosineParamScheduler(1.0, 0.5), 9)
    job.trainer.register_hooks([hooks.LRScheduler()])
    return hooks.ReduceOnPlateau(2, "top1", patience=0)


class Net(nn.Module):
    """Fails when told to; a batch is ``[N, 3]``."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.fails = False

    def forward(self, batch):
        if self.fails:
            raise RuntimeError("no forward pass today")
        return self.layers(batch).square().mean()


class Job:
    """A trainer with one hook of a class beside an evaluation every second iteration."""

    def __init__(self, name, folder):
        self.folder = folder
        self.model = Net()
        self.optimizer = sgd(self.model, momentum=0.9)
        self.data = list(torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(1)))
        self.trainer = SimpleTrainer(self.model, self.data, self.optimizer)
        self.checkpointer = Checkpointer(self.model, folder, trainer=self.trainer)
        self.hook = MAKE[name](self)
        evaluate = EvalHook(2, lambda: {"top1": 50.0 - abs(self.trainer.iter - 3)})
        self.trainer.register_hooks([evaluate, self.hook])

    def with_checkpoints(self, hook):
        self.trainer.register_hooks([hooks.PeriodicCheckpointer(self.checkpointer, 0)])
        return hook

    def train(self, start_iter, max_iter):
        self.trainer.train(start_iter, max_iter)
        assert (self.trainer.status, self.trainer.iter) == ("finished", max_iter)


@pytest.fixture(params=PUBLIC)
def name(request):
    return request.param


def test_every_public_hook_is_in_the_table():
    assert list(MAKE) == PUBLIC


def test_a_hook_runs_twice(name, tmp_path):
    job = Job(name, tmp_path)
    job.train(0, 5)
    job.train(0, 5)
    job.train(5, 8)


def test_a_hook_stands_a_step_that_fails_and_the_run_can_go_on(name, tmp_path):
    job = Job(name, tmp_path)

    def fail_later(trainer):
        job.model.fails = trainer.iter == 3

    job.trainer.register_hooks([hooks.CallbackHook(before_step=fail_later)])
    with pytest.raises(RuntimeError, match="no forward pass today"):
        job.trainer.train(0, 6)
    assert (job.trainer.status, job.trainer.iter) == ("failed", 3)
    job.trainer.register_hooks([hooks.CallbackHook(before_step=lambda trainer: setattr(job.model, "fails", False))])
    job.train(3, 6)


def test_the_state_of_a_hook_survives_a_file(name, tmp_path):
    first = Job(name, tmp_path)
    first.train(0, 5)
    path = tmp_path / "state.pth"
    torch.save(first.trainer.state_dict(), path)
    state = torch.load(path, weights_only=True)

    second = Job(name, tmp_path)
    second.trainer.load_state_dict(state)
    assert same(second.hook.state_dict(), state["hooks"].get(name, {}))
    assert same(first.hook.state_dict(), state["hooks"].get(name, {}))
    second.train(5, 8)


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("CheckFiniteLoss", {"interval": 0}, "interval must be .* got 0"),
        ("EMAHook", {"kind": "swa"}, "kind must be one of .* got 'swa'"),
        ("EMAHook", {"decay": 1}, "decay .* got .* 1,"),
        ("EMAHook", {"buffers": "keep"}, "buffers must be .* got 'keep'"),
        ("Freeze", {"names": "a", "begin": 2, "end": 2}, "end must be .* got 2"),
        ("ParamScheduler", {"param": "lr", "schedules": [{"NAME": "Cosin"}]}, "Cosin"),
        ("PublishWeights", {"weights": "best"}, "got best"),
        ("ReduceOnPlateau", {"eval_period": 1, "val_metric": "loss", "factor": 1.0}, "factor .* got .*1.0"),
        ("SyncBuffers", {"period": -1}, "period must be .* got -1"),
        ("Throughput", {"peak_tflops": 0}, "peak_tflops must be .* got 0"),
        ("VisualizationHook", {"draw": "nothing"}, "no 'nothing' in the VISUALIZER registry"),
        ("VisualizationHook", {"draw": print, "phases": "train"}, "phases must be .* got 'train'"),
    ],
)
def test_a_wrong_argument_is_an_error_of_the_constructor_that_names_it(name, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(hooks, name)(**arguments)
