"""The job whose steps are timed, and the trainers that do it."""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from fvcore.common.param_scheduler import CosineParamScheduler
from torch import Tensor, nn

from trainkit.config import CfgNode, get_cfg
from trainkit.engine import DefaultTrainer, HookBase, SimpleTrainer, TrainerBase, hooks
from trainkit.solver import LRMultiplier, WarmupParamScheduler
from trainkit.utils import comm
from trainkit.utils.events import CommonMetricPrinter, EventWriter, JSONWriter
from trainkit.utils.logger import close_logger, setup_logger

Batch = tuple[Tensor, Tensor]

StepRunner = Callable[[int], float]
"""Called with a number of steps: does them, and returns the seconds of one."""

LR = 0.01
LOG_PERIOD = 20
MAX_ITER = 100_000_000  # length of the schedule; every measurement is much shorter
WARMUP_ITERS = 1000
WARMUP_FACTOR = 0.001


class TinyModel(nn.Module):
    """One linear layer with two losses; its step is about the shortest that PyTorch allows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: nn.Module = nn.Linear(16, 16)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        inputs, targets = batch
        outputs = self.layers(inputs)
        return {
            "loss_mse": nn.functional.mse_loss(outputs, targets),
            "loss_l1": nn.functional.l1_loss(outputs, targets),
        }


class DeepModel(TinyModel):
    """Like `TinyModel`, with 50 layers: 100 parameter tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(50)))


class WideModel(TinyModel):
    """Like `TinyModel`, with two million parameters."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 16),
        )


def make_model(model_class: type[nn.Module] = TinyModel) -> nn.Module:
    torch.manual_seed(0)
    return model_class()


def make_batches(count: int = 100, size: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        inputs = torch.randn(size, 16, generator=generator)
        targets = torch.randn(size, 16, generator=generator)
        batches.append((inputs, targets))
    return batches


class EndlessBatches:
    """The batches, repeated: for trainers that do not accept a list, or that pause at its end."""

    def __init__(self) -> None:
        self.dataset = make_batches()

    def __iter__(self) -> Iterator[Batch]:
        return itertools.cycle(self.dataset)

    def __len__(self) -> int:
        return MAX_ITER


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def schedule(iteration: int) -> float:
    """The factor of the learning rate: a linear warm-up, then a cosine."""
    if iteration >= WARMUP_ITERS:
        return 0.5 * (1 + math.cos(math.pi * iteration / MAX_ITER))
    done = iteration / WARMUP_ITERS
    return WARMUP_FACTOR * (1 - done) + schedule(WARMUP_ITERS) * done


# ---------------------------------------------------------------------------- trainers


def make_writers(folder: Path) -> list[EventWriter]:
    """A console line and a JSON line at each write. A job's own console writes once per second."""
    if not comm.is_main_process():
        return []
    return [CommonMetricPrinter(MAX_ITER), JSONWriter(folder / "metrics.json")]


def simple_trainer(
    folder: Path,
    *,
    model: nn.Module | None = None,
    more_hooks: Sequence[HookBase] = (),
    trainer_class: type[SimpleTrainer] = SimpleTrainer,
    **options: Any,
) -> SimpleTrainer:
    """The job in a trainer with hooks for the timer, the schedule and the writers.

    Args:
        model: replaces the tiny model; it gets the same batches.
        options: arguments of the trainer.
    """
    if model is None:
        model = make_model()
    optimizer = make_optimizer(model)
    trainer = trainer_class(model, make_batches(), optimizer, **options)
    register_hooks(trainer, folder, more_hooks)
    return trainer


def register_hooks(
    trainer: SimpleTrainer, folder: Path, more_hooks: Sequence[HookBase] = ()
) -> None:
    """Add the hooks for the timer, the schedule and the writers, and others before the writers."""
    optimizer = trainer.optimizer
    multiplier = WarmupParamScheduler(
        CosineParamScheduler(1.0, 0.0), WARMUP_FACTOR, WARMUP_ITERS / MAX_ITER
    )
    scheduler = LRMultiplier(optimizer, multiplier, MAX_ITER)
    trainer.register_hooks([hooks.IterationTimer(), hooks.LRScheduler(optimizer, scheduler)])
    trainer.register_hooks(more_hooks)
    trainer.register_hooks([hooks.PeriodicWriter(make_writers(folder), LOG_PERIOD)])


class JobTrainer(DefaultTrainer):
    """The job from a config, with all default hooks."""

    model_class: type[nn.Module] = TinyModel

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        return make_model(cls.model_class)

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(model)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Iterable[Batch]:
        return make_batches()

    def build_writers(self) -> list[EventWriter]:
        return make_writers(Path(self.cfg.OUTPUT_DIR))


class DeepJobTrainer(JobTrainer):
    model_class = DeepModel


def default_trainer(
    folder: Path,
    trainer_class: type[JobTrainer] = JobTrainer,
    *,
    more_hooks: Sequence[HookBase] = (),
    settings: Sequence[Any] = (),
) -> JobTrainer:
    """The job in a `DefaultTrainer`. No timed step saves; the stop after each chunk does.

    Args:
        settings: further keys of the config and their values, as on a command line.
    """
    cfg = get_cfg()
    cfg.OUTPUT_DIR = str(folder)
    cfg.MODEL.DEVICE = "cpu"
    cfg.SOLVER.BASE_LR = LR
    cfg.SOLVER.MAX_ITER = MAX_ITER
    cfg.SOLVER.CHECKPOINT_PERIOD = MAX_ITER
    cfg.SOLVER.LR_SCHEDULER_NAME = "WarmupCosineLR"
    cfg.SOLVER.WARMUP_ITERS = WARMUP_ITERS
    cfg.SOLVER.WARMUP_FACTOR = WARMUP_FACTOR
    cfg.CHECKPOINT.MAX_TO_KEEP = 1
    cfg.LOG.PERIOD = LOG_PERIOD
    cfg.merge_from_list(list(settings))
    trainer = trainer_class(cfg)
    trainer.register_hooks(more_hooks)
    return trainer


class StopAfter(HookBase):
    """Stops a run after some steps, and times the last ones of them."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def plan(self, first: int, last: int) -> None:
        """Time what comes after the iteration ``first``, to the end of the iteration ``last``."""
        self._first = first
        self._last = last

    def after_step(self) -> None:
        iteration = self.trainer.iter
        if iteration == self._first:
            self._finish()
            self._start = time.perf_counter()
        elif iteration == self._last:
            self._finish()
            total = time.perf_counter() - self._start
            self.step_sec = total / (self._last - self._first)
            self.trainer.request_stop("the chunk is timed")


class Chunks:
    """Runs a trainer for some steps per call, in a run that is stopped between the calls.

    The histories, the writers' files and the schedule continue. The steps of the first log period
    of each call are not timed.

    Args:
        finish: waits for the device.
    """

    def __init__(self, trainer: TrainerBase, finish: Callable[[], None] = lambda: None) -> None:
        self.trainer = trainer
        self._stop = StopAfter(finish)
        trainer.register_hooks([self._stop])

    def __call__(self, steps: int) -> float:
        """Do this number of timed steps; returns the seconds of one."""
        start_iter = self.trainer.iter
        first = start_iter + LOG_PERIOD - 1
        self._stop.plan(first, first + steps)
        self.trainer.train(start_iter, MAX_ITER)
        return self._stop.step_sec


@contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """In this context trainkit logs into ``log.txt``, and to a stdout that is discarded."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        setup_logger(folder, comm.get_rank())
        try:
            yield
        finally:
            close_logger()
