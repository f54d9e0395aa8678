"""On a GPU: a step beside a bare loop, and a save beside torch.save and fsync.

The convolutions keep the GPU busy; the small layers have about 500 kernels per step, each shorter
than its launch, which a recorded graph saves. Batches are in pinned memory, and optimizers are fused.
The trainers store and write as in the first section, the bare loop does not. Of an asynchronous
save, the time is until the device has done what the next step waits for.
"""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import job
from benchmarks.by_hand import BareLoop
from benchmarks.job import Chunks, StepRunner
from benchmarks.measure import Comparison, Way, compare, timed
from benchmarks.save import Stack, empty, sync
from trainkit.checkpoint import Checkpointer
from trainkit.engine import GraphTrainer, SimpleTrainer
from trainkit.utils.device import move_to_device

ROUNDS = 9

MakeModel = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


class Convolutions(nn.Module):
    """About 8 TFLOP per step with 256 channels and 64 pictures of 112 x 112."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, stride=2, padding=1)]
        for _ in range(12):
            layers.append(nn.Conv2d(channels, channels, 3, padding=1))
            layers.append(nn.GroupNorm(8, channels))
            layers.append(nn.ReLU())
        self.layers = nn.Sequential(*layers)

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        with torch.autocast(batch.device.type, torch.bfloat16):
            outputs = self.layers(batch).float()
        return {"loss_mse": outputs.square().mean(), "loss_l1": (outputs - 1).abs().mean()}


class SmallLayers(nn.Module):
    """30 layers with norms."""

    width = 64

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(30):
            layers.append(nn.Linear(self.width, self.width))
            layers.append(nn.LayerNorm(self.width))
            layers.append(nn.GELU())
        self.layers = nn.Sequential(*layers)

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        outputs = self.layers(batch)
        return {"loss_mse": outputs.square().mean(), "loss_l1": (outputs - 1).abs().mean()}


def measure(rounds: int, scratch: Path, quick: bool) -> list[Comparison]:
    if torch.cuda.is_available():
        device = "cuda"
    elif quick:
        device = "cpu"
    else:
        return []
    with job.logging_to(scratch):
        return [
            _convolutions(rounds, scratch / "convolutions", quick, device),
            _small_layers(rounds, scratch / "small", quick, device),
            _save(rounds, scratch / "save", quick, device),
        ]


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.current_stream().synchronize()


# ---------------------------------------------------------------------------- steps


def _convolutions(rounds: int, folder: Path, quick: bool, device: str) -> Comparison:
    channels, pictures, steps = (8, 2, 2) if quick else (256, 64, 40)
    batches = [torch.randn(pictures, 3, 112, 112) for _ in range(4)]

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Convolutions(channels).to(device)
        return model, torch.optim.SGD(model.parameters(), job.LR, momentum=0.9, fused=True)

    trainers = {"SimpleTrainer": SimpleTrainer}
    work = "a step with 12 convolutions"
    return _compare_steps(work, make, batches, trainers, rounds, steps, folder, device)


def _small_layers(rounds: int, folder: Path, quick: bool, device: str) -> Comparison:
    batches = [torch.randn(16, SmallLayers.width) for _ in range(4)]

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = SmallLayers().to(device)
        return model, torch.optim.AdamW(model.parameters(), job.LR / 10, fused=True)

    trainers = {"SimpleTrainer": SimpleTrainer, "GraphTrainer": GraphTrainer}
    work = "a step with 30 small layers"
    steps = 2 if quick else 200
    return _compare_steps(work, make, batches, trainers, rounds, steps, folder, device)


def _compare_steps(
    work: str,
    make: MakeModel,
    batches: list[Tensor],
    trainers: dict[str, type[SimpleTrainer]],
    rounds: int,
    steps: int,
    folder: Path,
    device: str,
) -> Comparison:
    if device == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    finish = partial(wait_for, device)
    on_device = map(partial(move_to_device, device=torch.device(device)), itertools.cycle(batches))
    model, optimizer = make()
    loop = BareLoop(model, optimizer, on_device, finish)
    others: dict[str, Way] = {}
    for name, trainer_class in trainers.items():
        model, optimizer = make()
        trainer = trainer_class(model, batches, optimizer, async_write_metrics=True)
        job.register_hooks(trainer, folder / name)
        run: StepRunner = Chunks(trainer, finish)
        others[name] = partial(run, steps)
    return compare(work, BareLoop, partial(loop, steps), others, rounds)


# ---------------------------------------------------------------------------- save


def save_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    sync(path)


def _save(rounds: int, folder: Path, quick: bool, device: str) -> Comparison:
    model = Stack(1 if quick else 24, 1024).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.LR)
    inputs, targets = job.make_batches(1)[0]
    model((inputs.to(device), targets)).backward()
    optimizer.step()
    optimizer.zero_grad()
    folder.mkdir()
    formats = {
        "trainkit": "",
        "trainkit, staged": "staged",
        "trainkit, asynchronous": "async_save",
    }
    checkpointers = {}
    for name, format_name in formats.items():
        checkpointers[name] = Checkpointer(
            model, folder / name, format=format_name, optimizer=optimizer
        )

    def before() -> None:
        for checkpointer in checkpointers.values():
            checkpointer.wait()
        empty(folder)
        wait_for(device)

    def save(checkpointer: Checkpointer) -> None:
        checkpointer.save("model")
        wait_for(device)

    path = folder / "by_hand.pth"
    twin = timed(lambda: save_by_hand(model, optimizer, path), before)
    others: dict[str, Way] = {}
    for name, checkpointer in checkpointers.items():
        others[name] = timed(partial(save, checkpointer), before)
    comparison = compare("save, 300 MB", save_by_hand, twin, others, rounds)
    before()
    return comparison
