"""A save as a trainer makes it, beside one of the same state by hand.

Before a save, a trainer checks that the model is finite. The whole save is timed: the check, the
states of model, optimizer, hooks and random generators, the file, its name in `last_checkpoint`,
and the disk. By hand it is the same, but for the states of the hooks, which are collected before. Of
an asynchronous save, the time is what a step waits for; by hand that is the check, the states, and
one copy of them. fvcore's Checkpointer (detectron2's) does neither check the model nor wait for
the disk. "30 scalars" is the job of the tiny model with 30 scalars after 20,000 steps; the others
have 24 layers of 1024 x 1024 without (100 MB) and with AdamW (300 MB), and 6,000 tensors of up to
256 numbers.
"""

import os
import random
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fvcore.common.checkpoint import Checkpointer as FvcoreCheckpointer
from torch import Tensor, nn

from benchmarks import job
from benchmarks.by_hand import are_finite
from benchmarks.measure import Comparison, compare, one_thread, timed
from trainkit.config import CfgNode
from trainkit.engine import HookBase

ROUNDS = 15


class Stack(nn.Module):
    """Linear layers of one width."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))

    def forward(self, batch: job.Batch) -> Tensor:
        inputs, _ = batch
        outputs = self.layers(inputs.new_ones(1, self.width))
        return outputs.square().mean()


class StackTrainer(job.JobTrainer):
    """24 layers of 1024 x 1024, 100 MB of weights. SGD without momentum has no state."""

    count = 24
    width = 1024

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        return Stack(cls.count, cls.width)

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=job.LR)


class AdamWTrainer(StackTrainer):
    """The same weights with twice their size in the optimizer: 300 MB."""

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=job.LR)


class ManyTensorsTrainer(StackTrainer):
    """6,000 tensors of at most 256 numbers."""

    count = 3000
    width = 16


class OneLayerTrainer(AdamWTrainer):
    """For a quick run."""

    count = 1
    width = 16


class PutScalars(HookBase):
    """Stores further scalars in each step."""

    def __init__(self, count: int) -> None:
        self._names = [f"scalar_{n}" for n in range(count)]

    def after_step(self) -> None:
        for name in self._names:
            self.trainer.storage.put_scalar(name, 0.5)


Job = tuple[type[job.JobTrainer], int, int]
"""The trainer, its number of steps, and of further scalars in each of them."""

JOBS: dict[str, Job] = {
    "30 scalars": (job.JobTrainer, 20_000, 22),
    "100 MB": (StackTrainer, 1, 0),
    "300 MB": (AdamWTrainer, 1, 0),
    "6,000 tensors": (ManyTensorsTrainer, 1, 0),
}
QUICK_JOBS: dict[str, Job] = {"one layer": (OneLayerTrainer, 1, 22)}


def measure(rounds: int, scratch: Path, quick: bool) -> list[Comparison]:
    comparisons = []
    jobs = QUICK_JOBS if quick else JOBS
    with one_thread(), job.logging_to(scratch):
        for name, (trainer_class, steps, scalars) in jobs.items():
            folder = scratch / name
            hooks = [PutScalars(scalars)]
            trainer = train(trainer_class, steps, hooks, folder / "synchronous")
            comparisons.append(_synchronous(f"save, {name}", trainer, folder, rounds))
            comparisons.append(_check(f"finite check, {name}", trainer, rounds))
            asynchronous = train(
                trainer_class, steps, hooks, folder / "asynchronous", "CHECKPOINT.ASYNC", True
            )
            work = f"wait for an asynchronous save, {name}"
            comparisons.append(_asynchronous(work, asynchronous, folder, rounds))
    return comparisons


def train(
    trainer_class: type[job.JobTrainer],
    steps: int,
    hooks: list[PutScalars],
    folder: Path,
    *settings: Any,
) -> job.JobTrainer:
    """A trainer that has done some steps."""
    trainer = job.default_trainer(folder, trainer_class, more_hooks=hooks, settings=settings)
    job.Chunks(trainer)(steps)
    trainer.checkpointer.wait()
    return trainer


# ---------------------------------------------------------------------------- by hand


def save_by_hand(trainer: job.JobTrainer, rest: "Rest", path: Path) -> None:
    check_by_hand(trainer)
    temporary = path.with_name("temporary")
    torch.save(state_by_hand(trainer, rest), temporary)
    replace(temporary, path)
    temporary.write_text(path.name, encoding="utf-8")
    replace(temporary, path.with_name("last_checkpoint"))
    sync(path.parent)


def copy_by_hand(trainer: job.JobTrainer, rest: "Rest", memory: dict[str, Tensor]) -> None:
    check_by_hand(trainer)
    copy_tensors(state_by_hand(trainer, rest), memory)


def check_by_hand(trainer: job.JobTrainer) -> None:
    model = trainer.model
    tensors = [parameter.detach() for parameter in model.parameters()]
    tensors += [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not are_finite(tensors):
        raise FloatingPointError(f"the model is not finite in iteration {trainer.iter}")


def state_by_hand(trainer: job.JobTrainer, rest: "Rest") -> dict[str, Any]:
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "rest": rest.state_dict(),
    }


def copy_tensors(state: Any, memory: dict[str, Tensor], path: str = "") -> None:
    """Copy the tensors of a state into memory that is kept for the next copy."""
    if isinstance(state, Tensor):
        if path not in memory:
            memory[path] = torch.empty_like(state)
        memory[path].copy_(state)
    elif isinstance(state, dict):
        for name, value in state.items():
            copy_tensors(value, memory, f"{path}.{name}")
    elif isinstance(state, list):
        for index, value in enumerate(state):
            copy_tensors(value, memory, f"{path}.{index}")


def replace(temporary: Path, path: Path) -> None:
    sync(temporary)
    os.replace(temporary, path)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# ---------------------------------------------------------------------------- measured


class Rest:
    """The states beside model and optimizer, as an object with a state."""

    def __init__(self, trainer: job.JobTrainer) -> None:
        self._model = trainer.model
        state = trainer.checkpointer.collect({})
        of_trainer = state["trainer"]
        self._histories = {}
        for name, history in of_trainer["storage"].pop("histories").items():
            values = array("d", history["values"].tolist())
            iterations = array("q", history["iterations"].tolist())
            self._histories[name] = (values, iterations)
        # collected anew in each save
        del state["model"]
        del of_trainer["rng"]
        del of_trainer["_trainer"]["optimizer"]
        del of_trainer["_trainer"]["optimizer_groups"]
        self._others = state

    def state_dict(self) -> dict[str, Any]:
        return {
            "parameters": self._parameters(),
            "histories": {name: _copies(*pair) for name, pair in self._histories.items()},
            "random": _random_states(),
            "others": self._others,
        }

    def _parameters(self) -> dict[str, torch.Size]:
        """The name and shape of each parameter, in the order of the optimizer."""
        return {name: value.shape for name, value in self._model.named_parameters()}


def _random_states() -> dict[str, Any]:
    _, python_keys, _ = random.getstate()
    numpy_state = np.random.get_state(legacy=False)["state"]
    return {
        "python": torch.from_numpy(np.array(python_keys, np.int64)),
        "numpy": torch.from_numpy(numpy_state["key"].astype(np.int64)),
        "numpy_position": numpy_state["pos"],
        "torch": torch.get_rng_state(),
    }


def _copies(values: "array[float]", iterations: "array[int]") -> list[Tensor]:
    return [torch.from_numpy(np.array(values)), torch.from_numpy(np.array(iterations))]


def _synchronous(work: str, trainer: job.JobTrainer, folder: Path, rounds: int) -> Comparison:
    rest = Rest(trainer)
    fvcore_folder = folder / "fvcore"
    fvcore_folder.mkdir()
    fvcore = FvcoreCheckpointer(
        trainer.model, str(fvcore_folder), optimizer=trainer.optimizer, rest=rest
    )
    path = folder / "by_hand.pth"
    before = partial(empty, folder)
    run_by_hand = timed(lambda: save_by_hand(trainer, rest, path), before)
    others = {
        "trainkit": timed(lambda: trainer.request_save("model"), before),
        "fvcore's Checkpointer": timed(lambda: fvcore.save("model"), before),
    }
    return compare(work, save_by_hand, run_by_hand, others, rounds)


def _check(work: str, trainer: job.JobTrainer, rounds: int) -> Comparison:
    run_by_hand = timed(lambda: check_by_hand(trainer))
    others = {"trainkit": timed(trainer.check_finite)}
    return compare(work, check_by_hand, run_by_hand, others, rounds)


def _asynchronous(work: str, trainer: job.JobTrainer, folder: Path, rounds: int) -> Comparison:
    rest = Rest(trainer)
    memory: dict[str, Tensor] = {}

    def before() -> None:
        trainer.checkpointer.wait()  # no way competes with the thread that writes
        empty(folder)

    copy = timed(lambda: copy_by_hand(trainer, rest, memory), before)
    others = {"trainkit": timed(lambda: trainer.request_save("model"), before)}
    comparison = compare(work, copy_by_hand, copy, others, rounds)
    trainer.checkpointer.wait()
    return comparison


def empty(folder: Path) -> None:
    """Remove all checkpoints, so that the time of a save does not include freeing their blocks."""
    for path in folder.rglob("*.pth"):
        path.unlink()
        sync(path.parent)
