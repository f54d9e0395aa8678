"""Whether the loop ever waits for a GPU, and its speed on a GPU."""

import itertools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks import checkpoint, job
from benchmarks.measure import Row, alternate, compare
from trainkit.config import CfgNode, get_cfg
from trainkit.data import build_train_loader
from trainkit.engine import DefaultTrainer, HookBase, SimpleTrainer
from trainkit.utils.device import move_to_device

_NO_GPU = "no GPU"
_WARM_UP = 40  # steps in which kernels are chosen, memory is allocated, and two writes are done

SYNCHRONIZATIONS = Row("host synchronizations in 100 steps on CUDA", None, 0, "", note=_NO_GPU)
RUN_AHEAD = Row(
    "steps that the host finishes while the device sleeps", None, 2, "", at_least=True, note=_NO_GPU
)
THROUGHPUT = Row("GPU throughput over a bare loop", None, 0.99, at_least=True, note=_NO_GPU)
SAVE = Row("stall of an asynchronous save on CUDA", None, 1 / 20, note=_NO_GPU)


def cuda(rounds: int = 9, *, scratch: Path) -> list[Row]:
    """The rows; without values if there is no GPU."""
    if not torch.cuda.is_available():
        return [SYNCHRONIZATIONS, RUN_AHEAD, THROUGHPUT, SAVE]
    with job.logging_to(scratch):
        rows = [synchronizations(scratch / "synchronizations"), run_ahead(scratch / "run_ahead")]
        rows.append(throughput(scratch / "throughput", rounds))
    stall, staged = checkpoint.save(rounds, scratch=scratch, device="cuda")
    return [*rows, replace(stall, name=SAVE.name), replace(staged, name="staged save on CUDA")]


# ---------------------------------------------------------------------------- waiting


class _Run(DefaultTrainer):
    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        layers = [
            nn.Linear(64, 256),
            nn.BatchNorm1d(256),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(256, 1),
        ]
        return _Losses(nn.Sequential(*layers)).to(cfg.MODEL.DEVICE)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Iterable[Any]:
        inputs = torch.randn(5000, 64, generator=torch.Generator().manual_seed(0))
        return build_train_loader(cfg, TensorDataset(inputs))


class _Losses(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, batch: list[Tensor]) -> dict[str, Tensor]:
        outputs = self.layers(batch[0]).float()
        return {"loss_square": outputs.square().mean(), "loss_abs": (outputs - 1).abs().mean()}


def everything_on(
    output_dir: Path, device: str, more_hooks: Iterable[HookBase] = ()
) -> DefaultTrainer:
    """All default hooks and writers, float16 with a gradient scaler, a fused optimizer, clipping, EMA, workers.

    No step of it saves or evaluates before the last one.
    """
    cfg = get_cfg()
    cfg.OUTPUT_DIR, cfg.MODEL.DEVICE, cfg.SEED = str(output_dir), device, 1
    cfg.DATALOADER.NUM_WORKERS = 2
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.CHECKPOINT_PERIOD = job.MAX_ITER, job.MAX_ITER
    cfg.SOLVER.OPTIMIZER.NAME, cfg.SOLVER.OPTIMIZER.FUSED = "AdamW", True
    cfg.SOLVER.LR_SCHEDULER_NAME = "WarmupCosineLR"
    cfg.SOLVER.AMP.ENABLED = True
    cfg.SOLVER.CLIP_GRADIENTS.ENABLED, cfg.SOLVER.CLIP_GRADIENTS.CLIP_TYPE = True, "full_model"
    cfg.HOOKS = [{"NAME": "EMAHook"}]
    trainer = _Run(cfg)
    trainer.register_hooks(more_hooks)
    return trainer


class Between(HookBase):
    """Calls ``begin()`` before an iteration and ``end()`` after a later one, then stops the run."""

    def __init__(
        self, first: int, last: int, begin: Callable[[], object], end: Callable[[], object]
    ) -> None:
        self._first, self._last, self._begin, self._end = first, last, begin, end

    def before_step(self) -> None:
        if self.trainer.iter == self._first:
            self._begin()

    def after_step(self) -> None:
        if self.trainer.iter == self._last:
            self._end()
            self.trainer.request_stop("everything is measured")


def _forbid_waiting() -> None:
    with warnings.catch_warnings():  # torch warns once that it does not see all synchronizations
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")


def synchronizations(
    output_dir: Path, more_hooks: Iterable[HookBase] = (), steps: int = 100
) -> Row:
    """(1, the message) if anything waits for the device in ``steps`` steps after the warm-up; else 0."""
    watch = Between(
        _WARM_UP,
        _WARM_UP + steps,  # one step more, so that the hooks after this one run in all steps
        _forbid_waiting,
        partial(torch.cuda.set_sync_debug_mode, "default"),
    )
    trainer = everything_on(output_dir, "cuda", [watch, *more_hooks])
    try:
        trainer.train()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return replace(SYNCHRONIZATIONS, value=1, note=f"iteration {trainer.iter}: {error}")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return replace(SYNCHRONIZATIONS, value=0, note="")


class _WhileAsleep(HookBase):
    """Lets the device sleep before iteration `_WARM_UP`, counts the steps until it wakes up, then stops the run."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.num_steps = 0

    def before_train(self) -> None:
        self._cycles, self._asleep = _cycles(self._seconds), torch.cuda.Event()

    def before_step(self) -> None:
        if self.trainer.iter == _WARM_UP:
            torch.cuda.synchronize()
            torch.cuda._sleep(self._cycles)
            self._asleep.record()

    def after_step(self) -> None:
        if self.trainer.iter >= _WARM_UP:
            if self._asleep.query():
                self.trainer.request_stop("the device is awake")
            else:
                self.num_steps += 1


def run_ahead(output_dir: Path, more_hooks: Iterable[HookBase] = ()) -> Row:
    """How many steps the host finishes while the device sleeps for 2 s, before it waits for an earlier step.

    Each step holds its batch on the device, so there should be only a few of them.
    """
    sleeper = _WhileAsleep(2.0)
    everything_on(output_dir, "cuda", [*more_hooks, sleeper]).train()
    return replace(RUN_AHEAD, value=sleeper.num_steps, note="")


def _cycles(seconds: float) -> int:
    """The argument of ``torch.cuda._sleep`` for about this time, at the current clock rate."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    trial = 200_000_000
    torch.cuda._sleep(trial)  # first let the clock rate rise
    begin.record()
    torch.cuda._sleep(trial)
    end.record()
    end.synchronize()
    return round(trial * seconds * 1e3 / begin.elapsed_time(end))


# ---------------------------------------------------------------------------- throughput


class _Convolutions(nn.Module):
    """About 8 TFLOP per step with 256 channels and 64 pictures of 112 x 112."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, stride=2, padding=1)]
        for _ in range(12):
            layers += [
                nn.Conv2d(channels, channels, 3, padding=1),
                nn.GroupNorm(8, channels),
                nn.ReLU(),
            ]
        self.layers = nn.Sequential(*layers)

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        with torch.autocast(batch.device.type, torch.bfloat16):
            outputs = self.layers(batch).float()
        return {"loss_mse": outputs.square().mean(), "loss_l1": (outputs - 1).abs().mean()}


def throughput(
    output_dir: Path,
    rounds: int,
    *,
    steps: int = 40,
    channels: int = 256,
    pictures: int = 64,
    device: str = "cuda",
) -> Row:
    """The speed of `SimpleTrainer` with asynchronous writing and the hooks of the step rows, compared with a bare loop.

    Both copy pinned batches to the device and have a fused optimizer.
    """

    def finish() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = _Convolutions(channels).to(device)
        return model, torch.optim.SGD(model.parameters(), job.LR, momentum=0.9, fused=True)

    batches = [torch.randn(pictures, 3, 112, 112, pin_memory=device == "cuda") for _ in range(4)]
    to_device = partial(move_to_device, device=torch.device(device))
    bare = job.BareLoop(*make(), map(to_device, itertools.cycle(batches)), finish)
    model, optimizer = make()
    trainer = SimpleTrainer(model, batches, optimizer, async_write_metrics=True)
    job.register_hooks(trainer, output_dir)
    chunks = job.Chunks(trainer, finish)
    found = alternate(
        {"SimpleTrainer": partial(chunks, steps), "bare loop": partial(bare, steps)}, rounds
    )
    return compare(
        THROUGHPUT.name, found, "SimpleTrainer", "bare loop", THROUGHPUT.goal, at_least=True
    )
