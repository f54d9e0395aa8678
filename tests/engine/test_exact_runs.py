"""A run of everything at once that is broken off anywhere and resumed ends as one that ran through."""

import json
import shutil
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, Sampler

from tests.engine.job import tiny_cfg
from tests.engine.tiny import CLOCK_READINGS
from trainkit.checkpoint import Checkpointer
from trainkit.data import ResumableLoader
from trainkit.engine import DefaultTrainer, HookBase, SimpleTrainer
from trainkit.engine.hooks import CallbackHook, PeriodicCheckpointer
from trainkit.utils.env import seed_all_rng
from trainkit.utils.events import JSONWriter

HOOKS = [
    {"NAME": "EMAHook", "DECAY": 0.9, "EVALUATE": "both"},
    {"NAME": "ReduceOnPlateau", "VAL_METRIC": "classification/top1", "PATIENCE": 0, "FACTOR": 0.5},
    {"NAME": "ParamScheduler", "PARAM": "momentum", "SCHEDULES": [{"NAME": "Linear", "START_FACTOR": 0.5}]},
]
# periods without a common divisor; 40 samples in epochs of 3 1/3 iterations of 3 times 4
OPTIONS = ("SOLVER.MAX_ITER", 13, "SOLVER.IMS_PER_BATCH", 4, "SOLVER.ACCUMULATION_STEPS", 3)
OPTIONS += ("SOLVER.CHECKPOINT_PERIOD", 4, "TEST.EVAL_PERIOD", "1ep", "LOG.PERIOD", 2, "LOG.WINDOW", 5)
OPTIONS += ("SOLVER.AMP.ENABLED", True, "SOLVER.AMP.PRECISION", "bfloat16", "HOOKS", HOOKS)
OPTIONS += ("DATASETS.VAL", ("tiny_val",), "CHECKPOINT.BEST_METRIC", "classification/top1", "CHECKPOINT.MAX_TO_KEEP", 2)
OPTIONS += ("EARLY_STOPPING.METRIC", "classification/top1", "EARLY_STOPPING.PATIENCE", 2)
OPTIONS += ("CHECKPOINT.BEST_TO_KEEP", 2)


class Killed(BaseException):
    """Nothing in between catches it."""


class Killer(HookBase):
    """Breaks the run off at one point of one iteration; the second of two objects stands behind all other hooks."""

    def __init__(self, point, iter):
        def kill(*arguments):
            if self.trainer.iter == iter:
                raise Killed

        setattr(self, point, kill)


def run(folder, seed, killer=None, *options, last=False):
    cfg = tiny_cfg(folder, *OPTIONS, *options)
    seed_all_rng(seed)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load()
    trainer.register_hooks([killer], priority="LOWEST" if last else "HIGHEST")
    trainer.train()
    return trainer


def content(folder):
    """What a run leaves: path -> value of each checkpoint, lines of metrics.json; clock readings aside."""
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    lines = [{name: value for name, value in line.items() if name not in CLOCK_READINGS} for line in lines]
    files = {path.name: flat(torch.load(path)) for path in sorted(folder.glob("*.pth"))}
    return files, [line for line in lines if line.keys() - {"iteration", "epoch"}]


# a clock reading takes more or fewer digits in metrics.json; HOOKS may name one that sends signals; origin has folders
LEFT_OUT = {*CLOCK_READINGS, "length", "sizes", "id", "HOOKS", "origin"}


def flat(value, path=""):
    if isinstance(value, dict):
        kept = {name: item for name, item in value.items() if name not in LEFT_OUT}
        return {k: v for name, item in kept.items() for k, v in flat(item, f"{path}/{name}").items()}
    if isinstance(value, list | tuple):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{path}/{i}").items()}
    if isinstance(value, torch.Tensor):
        return {path: (value.dtype, tuple(value.shape), value.numpy().tobytes())}
    return {path: repr(value)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    trainer = run(folder, seed=1)
    return content(folder), trainer.iter


PLACES = [("before_step", True), ("after_backward", False), ("after_step", False), ("after_step", True)]
PLACES += [("before_eval_step", False), ("after_eval", True), ("before_save", False), ("after_epoch", True)]


@pytest.mark.parametrize("iter", [2, 5, 8, 12])
@pytest.mark.parametrize(("point", "last"), PLACES)
def test_a_run_that_is_broken_off_ends_as_the_whole_one(whole, tmp_path, point, last, iter):
    try:
        run(tmp_path, 1, Killer(point, iter), last=last)
    except Killed:
        if not list(tmp_path.glob("*.pth")):  # nothing to resume from: the new run starts again
            shutil.rmtree(tmp_path)
            run(tmp_path, 1)
        else:
            run(tmp_path, 2)
    assert content(tmp_path) == whole[0]


def test_a_run_that_is_broken_off_in_every_iteration_ends_as_the_whole_one(whole, tmp_path):
    for attempt in range(5, 13):
        try:
            run(tmp_path, attempt if attempt > 5 else 1, Killer("after_step", attempt), last=True)
        except Killed:
            continue
    run(tmp_path, 99)
    assert content(tmp_path) == whole[0]


def test_with_asynchronous_metrics_the_run_and_the_resumed_run_end_as_the_whole_one(whole, tmp_path, monkeypatch):
    write, threads = JSONWriter.write, []

    def spy(writer):
        threads.append(threading.current_thread().name)
        write(writer)

    monkeypatch.setattr(JSONWriter, "write", spy)
    run(tmp_path / "whole", 1, None, "LOG.ASYNC", True)
    assert {*threads} == {"trainkit-metrics_0"}
    assert content(tmp_path / "whole") == whole[0]
    with pytest.raises(Killed):
        run(tmp_path / "parts", 1, Killer("after_step", 9), "LOG.ASYNC", True)
    trainer = run(tmp_path / "parts", 2, None, "LOG.ASYNC", True)
    assert trainer.start_iter > 0
    assert content(tmp_path / "parts") == whole[0]


def test_a_run_of_another_seed_is_another_one(whole, tmp_path):
    run(tmp_path, 1, None, "SEED", 7)
    assert content(tmp_path)[1] != whole[0][1]


# ---------------------------------------------------------------------------- a finite sampler, a partial batch


class Shuffling(Sampler):
    """A finite sampler of a user's. ``draw`` gives the seed of an epoch; behind its end stands the next one."""

    def __init__(self, draw):
        self.draw, self.seed, self.count, self.epoch = draw, None, 0, 0

    def __iter__(self):
        yield from self.rest_of_epoch()
        self.count, self.epoch = 0, self.epoch + 1

    def rest_of_epoch(self):
        if self.count == 0:
            self.seed = self.draw(self.epoch)
        order = torch.randperm(18, generator=torch.Generator().manual_seed(self.seed)).tolist()
        while self.count < 18:
            self.count += 1
            yield order[self.count - 1]

    def __len__(self):
        return 18

    def state_dict(self):
        return {"seed": self.seed, "count": self.count, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.seed, self.count, self.epoch = state["seed"], state["count"], state["epoch"]


class Lazy(Shuffling):
    """The state stays at the end of an epoch until the next one begins."""

    def __iter__(self):
        if self.count == 18 and not self.is_loaded:
            self.count, self.epoch = 0, self.epoch + 1
        self.is_loaded = False
        yield from self.rest_of_epoch()

    is_loaded = False

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.is_loaded = True


class ShufflingStream(IterableDataset):
    def __init__(self, sampler):
        self.sampler = sampler
        self.state_dict, self.load_state_dict = sampler.state_dict, sampler.load_state_dict

    def __iter__(self):
        return map(SAMPLES.__getitem__, self.sampler)


SAMPLES = torch.randn(18, 4, generator=torch.Generator().manual_seed(0))
SAMPLERS = {
    "by epoch": lambda: Shuffling(lambda epoch: epoch),
    "of the global generator": lambda: Shuffling(lambda epoch: torch.randint(1000, ()).item()),
    "lazy": lambda: Lazy(lambda epoch: torch.randint(1000, ()).item()),
}


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, batch):
        return (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()


def train_on_finite_data(folder, make_sampler, *, change=None, accumulation_steps=1, **options):
    """12 iterations of 4 of 18 samples, each fifth has 2; saved behind that one. The losses, and the weights."""
    torch.manual_seed(2 if folder.exists() else 1)
    model, sampler = Dropping(), make_sampler()
    source = (SAMPLES, {"sampler": sampler}) if isinstance(sampler, Sampler) else (sampler, {})
    loader = ResumableLoader(source[0], batch_size=4, seed=1, **source[1], **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    trainer = SimpleTrainer(model, loader, optimizer, accumulation_steps=accumulation_steps)
    checkpointer = Checkpointer(model, folder, trainer=trainer)
    losses = []
    keep = CallbackHook(after_step=lambda trainer: losses.append(trainer.losses["total_loss"].item()))
    trainer.register_hooks([keep, PeriodicCheckpointer(checkpointer, 5)])
    checkpointer.resume_or_load("")
    if change is not None:
        change(loader)
    trainer.train(trainer.iter + 1 if checkpointer.has_checkpoint() else 0, 12)
    return losses, [weight.tolist() for weight in model.parameters()]


def begin_part(whole, part):
    """A folder whose last checkpoint is that of iteration 4."""
    part.mkdir()
    shutil.copy(whole / "model_0000004.pth", part)
    (part / "last_checkpoint").write_text("model_0000004.pth")
    return part


WORKERS = {
    "0": {},
    "2": {"num_workers": 2},
    "2 persistent": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_run_saved_with_the_partial_batch_of_a_finite_sampler_ends_as_the_whole_one(tmp_path, kind, workers):
    def begin_anew(loader):
        loader.load_state_dict({**loader.state_dict(), "batches": 0, "position": 0})

    def train(folder, **more):
        return train_on_finite_data(folder, SAMPLERS[kind], **WORKERS[workers], **more)

    losses, weights = train(tmp_path / "whole")
    part, control = (begin_part(tmp_path / "whole", tmp_path / name) for name in ("part", "control"))

    assert train(part) == (losses[5:], weights)
    assert train(control, change=begin_anew) != (losses[5:], weights)


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_a_run_saved_after_windows_that_crossed_epochs_ends_as_the_whole_one(tmp_path, steps):
    def train(folder):
        return train_on_finite_data(folder, SAMPLERS["by epoch"], accumulation_steps=steps)

    losses, weights = train(tmp_path / "whole")
    assert train(begin_part(tmp_path / "whole", tmp_path / "part")) == (losses[5:], weights)


def test_a_run_saved_with_the_partial_batch_of_a_stream_ends_as_the_whole_one(tmp_path):
    def train(folder):
        return train_on_finite_data(folder, lambda: ShufflingStream(SAMPLERS["by epoch"]()))

    losses, weights = train(tmp_path / "whole")
    assert train(begin_part(tmp_path / "whole", tmp_path / "part")) == (losses[5:], weights)
