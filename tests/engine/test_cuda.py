"""That the loop never waits for a GPU."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.cuda import allow_waiting, forbid_waiting, needs_cuda
from trainkit.config import get_cfg
from trainkit.data import build_train_loader
from trainkit.engine import DefaultTrainer, HookBase

WARM_UP = 40  # steps in which kernels are chosen, memory is allocated, and two writes are done
MAX_ITER = 100_000


class Losses(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 256),
            nn.BatchNorm1d(256),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(256, 1),
        )

    def forward(self, batch):
        outputs = self.layers(batch[0]).float()
        return {"loss_square": outputs.square().mean(), "loss_abs": (outputs - 1).abs().mean()}


class Everything(DefaultTrainer):
    @classmethod
    def build_model(cls, cfg):
        return Losses().to(cfg.MODEL.DEVICE)

    @classmethod
    def build_train_loader(cls, cfg):
        inputs = torch.randn(5000, 64, generator=torch.Generator().manual_seed(0))
        return build_train_loader(cfg, TensorDataset(inputs))


def everything_on(folder, device, more_hooks=()):
    """All default hooks and writers, float16 with a gradient scaler, a fused optimizer, clipping, EMA, workers.

    No step of it saves or evaluates before the last one.
    """
    cfg = get_cfg()
    cfg.OUTPUT_DIR = str(folder)
    cfg.MODEL.DEVICE = device
    cfg.SEED = 1
    cfg.DATALOADER.NUM_WORKERS = 2
    cfg.SOLVER.MAX_ITER = MAX_ITER
    cfg.SOLVER.CHECKPOINT_PERIOD = MAX_ITER
    cfg.SOLVER.OPTIMIZER.NAME = "AdamW"
    cfg.SOLVER.OPTIMIZER.FUSED = True
    cfg.SOLVER.LR_SCHEDULER_NAME = "WarmupCosineLR"
    cfg.SOLVER.AMP.ENABLED = True
    cfg.SOLVER.CLIP_GRADIENTS.ENABLED = True
    cfg.SOLVER.CLIP_GRADIENTS.CLIP_TYPE = "full_model"
    cfg.HOOKS = [{"NAME": "EMAHook"}]
    trainer = Everything(cfg)
    trainer.register_hooks(more_hooks)
    return trainer


class Between(HookBase):
    """Calls ``start()`` before an iteration and ``end()`` after a later one, then stops the run."""

    def __init__(self, first, last, start, end):
        self._first = first
        self._last = last
        self._start = start
        self._end = end

    def before_step(self):
        if self.trainer.iter == self._first:
            self._start()

    def after_step(self):
        if self.trainer.iter == self._last:
            self._end()
            self.trainer.request_stop("everything is measured")


class ReadLoss(HookBase):
    """What many loops do in every step."""

    def after_step(self):
        self.trainer.losses["loss_square"].item()


class WhileAsleep(HookBase):
    """Lets the device sleep before iteration `WARM_UP`, and counts the steps until it wakes up."""

    def __init__(self, seconds):
        self._seconds = seconds
        self.num_steps = 0

    def before_train(self):
        self._cycles = cycles(self._seconds)
        self._asleep = torch.cuda.Event()

    def before_step(self):
        if self.trainer.iter == WARM_UP:
            torch.cuda.synchronize()
            torch.cuda._sleep(self._cycles)
            self._asleep.record()

    def after_step(self):
        if self.trainer.iter >= WARM_UP:
            if self._asleep.query():
                self.trainer.request_stop("the device is awake")
            else:
                self.num_steps += 1


def cycles(seconds):
    """The argument of ``torch.cuda._sleep`` for about this time, at the current clock rate."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    trial = 200_000_000
    torch.cuda._sleep(trial)  # first let the clock rate rise
    start.record()
    torch.cuda._sleep(trial)
    end.record()
    end.synchronize()
    return round(trial * seconds * 1e3 / start.elapsed_time(end))


def train_without_waiting(folder, more_hooks=()):
    """100 steps after the warm-up; one step more, so that the hooks after the first run in all."""
    watch = Between(WARM_UP, WARM_UP + 100, partial(forbid_waiting, "error"), allow_waiting)
    trainer = everything_on(folder, "cuda", [watch, *more_hooks])
    try:
        trainer.train()
    finally:
        allow_waiting()
    return trainer


def steps_while_asleep(folder, more_hooks=()):
    """How many steps the host finishes while the device sleeps for 2 s, before it waits for an earlier step."""
    sleeper = WhileAsleep(2.0)
    everything_on(folder, "cuda", [*more_hooks, sleeper]).train()
    return sleeper.num_steps


@needs_cuda
def test_100_steps_with_everything_on_never_synchronize(tmp_path):
    assert train_without_waiting(tmp_path).iter == WARM_UP + 101


@needs_cuda
def test_a_hook_that_reads_the_loss_is_seen_to_synchronize(tmp_path):
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        train_without_waiting(tmp_path, [ReadLoss()])


@needs_cuda
def test_the_host_goes_two_steps_ahead_of_a_device_that_sleeps_and_no_further(tmp_path):
    # each step holds its batch on the device, so there should be only a few of them
    assert steps_while_asleep(tmp_path) == 2
    # a hook that reads the loss keeps it from that
    assert steps_while_asleep(tmp_path, [ReadLoss()]) == 0


@pytest.mark.slow
def test_everything_that_is_on_runs_on_a_cpu_as_well(tmp_path):
    calls = []
    between = Between(1, 20, lambda: calls.append("start"), lambda: calls.append("end"))
    trainer = everything_on(tmp_path, "cpu", [between])
    trainer.train()

    assert calls == ["start", "end"]
    assert trainer.iter == 21
    assert trainer.status == "stopped"
    stored = {"grad_norm", "[metric]grad_scaler", "skipped_updates", "total_loss", "lr"}
    assert stored <= {*trainer.storage.histories()}
    names = "IterationTimer, EMAHook, LRScheduler, PeriodicCheckpointer, EvalHook, "
    assert names in trainer.describe_hooks()
