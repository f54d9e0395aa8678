"""The job whose steps are timed: the bare loop, and the trainers that do the same with all their features."""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fvcore.common.param_scheduler import CosineParamScheduler
from torch import Tensor, nn

from trainkit.config import CfgNode, get_cfg
from trainkit.engine import (
    DefaultTrainer,
    HookBase,
    SimpleTrainer,
    TrainerBase,
    default_writers,
    hooks,
)
from trainkit.solver import LRMultiplier, WarmupParamScheduler
from trainkit.utils import comm
from trainkit.utils.events import CommonMetricPrinter
from trainkit.utils.logger import close_logger, setup_logger

Batch = tuple[Tensor, Tensor]

LR = 0.01
LOG_PERIOD = 20
MAX_ITER = 100_000_000  # length of the schedule; every measurement is much shorter
WARMUP_ITERS, WARMUP_FACTOR = 1000, 0.001
_WARMUP_LENGTH = WARMUP_ITERS / MAX_ITER


class TinyModel(nn.Module):
    """One linear layer with two losses; its step is about the shortest that PyTorch allows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear: nn.Module = nn.Linear(16, 16)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        inputs, targets = batch
        outputs = self.linear(inputs)
        return {
            "loss_mse": nn.functional.mse_loss(outputs, targets),
            "loss_l1": nn.functional.l1_loss(outputs, targets),
        }


class DeepModel(TinyModel):
    """Like `TinyModel`, with 50 layers: 100 parameter tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(*(nn.Linear(16, 16) for _ in range(50)))


def make_model(model_class: type[TinyModel] = TinyModel) -> TinyModel:
    torch.manual_seed(0)
    return model_class()


def make_batches(count: int = 100, size: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, 16, generator=generator), torch.randn(size, 16, generator=generator))
        for _ in range(count)
    ]


class PlainLoader:
    """The batches, repeated without end: for trainers that do not accept a list, or that pause at its end."""

    def __init__(self) -> None:
        self.dataset = make_batches()

    def __iter__(self) -> Iterator[Batch]:
        return itertools.cycle(self.dataset)

    def __len__(self) -> int:
        return MAX_ITER


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def schedule(iter: int) -> float:
    """The factor of the learning rate: a warm-up, then a cosine."""
    where = iter / MAX_ITER
    if iter >= WARMUP_ITERS:
        return 0.5 * (1 + math.cos(math.pi * where))
    done = where / _WARMUP_LENGTH
    return WARMUP_FACTOR * (1 - done) + schedule(WARMUP_ITERS) * done


class BareLoop:
    """The baseline of all comparisons: the same steps, with nothing logged, checked or timed.

    Args:
        batches: an endless iterator of batches on the model's device.
        finish: waits for the device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Iterator[Any],
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self._optimizer, self._batches, self._finish = model, optimizer, batches, finish
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    def __call__(self, steps: int) -> float:
        """Do this number of steps, and return the seconds per step."""
        model, optimizer, scheduler, batches = (
            self.model,
            self._optimizer,
            self._scheduler,
            self._batches,
        )
        model.train()
        self._finish()
        begin = time.perf_counter()
        for _ in range(steps):
            losses = model(next(batches))
            loss = losses["loss_mse"] + losses["loss_l1"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        self._finish()
        return (time.perf_counter() - begin) / steps


def bare_loop(model_class: type[TinyModel] = TinyModel) -> BareLoop:
    model = make_model(model_class)
    return BareLoop(model, make_optimizer(model), itertools.cycle(make_batches()))


# ---------------------------------------------------------------------------- trainers


class Stopwatch(HookBase):
    """Stops a run after some steps, and times the last ``steps`` of them."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._begin_iter = self._end_iter = -1
        self._begin = self.step_sec = math.nan

    def start(self, iter: int, steps: int) -> None:
        """Time the ``steps`` iterations after ``iter``."""
        self._begin_iter, self._end_iter = iter, iter + steps

    def after_step(self) -> None:
        iter = self.trainer.iter
        if iter == self._begin_iter:
            self._finish()
            self._begin = time.perf_counter()
        elif iter == self._end_iter:
            self._finish()
            self.step_sec = (time.perf_counter() - self._begin) / (
                self._end_iter - self._begin_iter
            )
            self.trainer.request_stop("the chunk is timed")


class Chunks:
    """Continues the training of a trainer by some steps per call, in a run that is stopped between the calls.

    The storage with its histories, the writers' files and the schedule continue. After each stop, the steps of the
    first log period are not timed.

    Args:
        finish: waits for the device.
    """

    def __init__(self, trainer: TrainerBase, finish: Callable[[], None] = lambda: None) -> None:
        self.trainer = trainer
        self._stopwatch = Stopwatch(finish)
        trainer.register_hooks([self._stopwatch])

    def __call__(self, steps: int, start_iter: int | None = None) -> float:
        """Do this number of steps, and return the seconds per step; the run starts again if ``start_iter`` is given."""
        start_iter = self.trainer.iter if start_iter is None else start_iter
        self._stopwatch.start(start_iter + LOG_PERIOD - 1, steps)
        self.trainer.train(start_iter, MAX_ITER)
        return self._stopwatch.step_sec


def simple_trainer(
    output_dir: Path,
    *,
    more_hooks: Iterable[HookBase] = (),
    model: nn.Module | None = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    trainer_class: type[SimpleTrainer] = SimpleTrainer,
    **options: Any,
) -> SimpleTrainer:
    """The job in a trainer with the hooks of the step rows; its defaults are gather period 1 and the finite check.

    Args:
        model: replaces the tiny model; it gets the same batches.
        options: arguments of the trainer.
    """
    model = make_model() if model is None else model
    optimizer = make_optimizer(model)
    trainer = trainer_class(wrap(model), make_batches(), optimizer, **options)
    register_hooks(trainer, output_dir, more_hooks)
    return trainer


def register_hooks(
    trainer: SimpleTrainer, output_dir: Path, more_hooks: Iterable[HookBase] = ()
) -> None:
    """Add the hooks for timer and LR, the JSON writer every 20 steps, and the console once per second."""
    multiplier = WarmupParamScheduler(CosineParamScheduler(1.0, 0.0), WARMUP_FACTOR, _WARMUP_LENGTH)
    writers = (
        default_writers(output_dir, MAX_ITER, ["console", "json"]) if comm.is_main_process() else []
    )
    trainer.register_hooks(
        [
            hooks.IterationTimer(),
            hooks.LRScheduler(
                trainer.optimizer, LRMultiplier(trainer.optimizer, multiplier, MAX_ITER)
            ),
            *more_hooks,
            hooks.PeriodicWriter(writers, LOG_PERIOD),
        ]
    )


class TinyTrainer(DefaultTrainer):
    """The job from a config, with all default hooks."""

    model_class: type[TinyModel] = TinyModel

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        return make_model(cls.model_class)

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(model)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Iterable[Batch]:
        return make_batches()


class DeepTrainer(TinyTrainer):
    model_class = DeepModel


def default_trainer(
    output_dir: Path,
    *,
    more_hooks: Iterable[HookBase] = (),
    trainer_class: type[TinyTrainer] = TinyTrainer,
) -> TinyTrainer:
    """The job in a `DefaultTrainer`. No timed step saves; each stop between two chunks saves, which is not timed."""
    cfg = get_cfg()
    cfg.OUTPUT_DIR, cfg.MODEL.DEVICE = str(output_dir), "cpu"
    cfg.SOLVER.BASE_LR, cfg.SOLVER.MAX_ITER, cfg.SOLVER.CHECKPOINT_PERIOD = LR, MAX_ITER, MAX_ITER
    cfg.SOLVER.LR_SCHEDULER_NAME = "WarmupCosineLR"
    cfg.SOLVER.WARMUP_ITERS, cfg.SOLVER.WARMUP_FACTOR = WARMUP_ITERS, WARMUP_FACTOR
    cfg.CHECKPOINT.MAX_TO_KEEP = 1
    cfg.LOG.PERIOD, cfg.LOG.WRITERS = LOG_PERIOD, ["console", "json"]
    trainer = trainer_class(cfg)
    trainer.register_hooks(more_hooks)
    return trainer


def console_trainer(output_dir: Path, *, more_hooks: Iterable[HookBase] = ()) -> SimpleTrainer:
    """`simple_trainer` with a line of the console every 20 steps."""
    console = hooks.PeriodicWriter([CommonMetricPrinter(MAX_ITER)], LOG_PERIOD)
    return simple_trainer(output_dir, more_hooks=[*more_hooks, console])


CONSOLE, ASYNC = "SimpleTrainer, console every 20 steps", "SimpleTrainer, asynchronous writing"
TRAINERS: dict[str, Callable[..., TrainerBase]] = {
    "SimpleTrainer": simple_trainer,
    CONSOLE: console_trainer,
    ASYNC: partial(simple_trainer, async_write_metrics=True),
    "DefaultTrainer": default_trainer,
}
"""The trainers of the step rows; each is called with a folder, and optionally ``more_hooks``."""


@contextmanager
def logging_to(output_dir: Path) -> Iterator[None]:
    """In this context trainkit logs into ``log.txt``, and to a stdout that is discarded."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        setup_logger(output_dir, comm.get_rank())
        try:
            yield
        finally:
            close_logger()


@contextmanager
def one_thread() -> Iterator[None]:
    """In this context torch computes in one thread, because more threads make tiny models slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
