"""Many scalars, and many writers.

The first jobs put 300 more scalars in each step of the tiny model: by 300 calls of `put_scalar`, and
by one call of `put_scalars`. The last one has no model: its step stores 8 scalars, and writes them to
the console, JSON, CSV and TensorBoard. By hand, the medians are computed once for all of these.
"""

import csv
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from benchmarks import job
from benchmarks.by_hand import HandWrittenLoop, Record
from benchmarks.job import Chunks
from benchmarks.measure import Comparison, compare, one_thread
from benchmarks.save import PutScalars
from trainkit.engine import HookBase, TrainerBase, hooks
from trainkit.engine.defaults import default_writers

ROUNDS = 21
MANY = 300


def measure(rounds: int, scratch: Path, quick: bool) -> list[Comparison]:
    steps = 2 if quick else 200
    with one_thread(), job.logging_to(scratch):
        return [
            _one_by_one(rounds, steps, scratch / "one_by_one"),
            _at_once(rounds, steps, scratch / "at_once"),
            _four_writers(rounds, steps, scratch / "writers"),
        ]


# ---------------------------------------------------------------------------- 300 scalars


class LoopWithCalls(HandWrittenLoop):
    """Stores 300 more scalars in each step, each by a call."""

    names = tuple(f"scalar_{n}" for n in range(MANY))

    def store(self, values: Mapping[str, float]) -> None:
        for name in self.names:
            self.record.store(self.iteration, {name: 0.5})
        super().store(values)


class LoopWithOneCall(HandWrittenLoop):
    """Stores 300 more scalars in each step by one call."""

    names = LoopWithCalls.names

    def store(self, values: Mapping[str, float]) -> None:
        self.record.store(self.iteration, dict.fromkeys(self.names, 0.5))
        super().store(values)


class PutScalarsAtOnce(HookBase):
    def after_step(self) -> None:
        self.trainer.storage.put_scalars(**dict.fromkeys(LoopWithCalls.names, 0.5))


def _one_by_one(rounds: int, steps: int, folder: Path) -> Comparison:
    loop = LoopWithCalls(job.make_model(), folder / "by_hand")
    trainer = job.simple_trainer(folder / "simple", more_hooks=[PutScalars(MANY)])
    others = {"SimpleTrainer": partial(Chunks(trainer), steps)}
    work = f"a step with {MANY} calls of put_scalar"
    return compare(work, LoopWithCalls, partial(loop, steps), others, rounds)


def _at_once(rounds: int, steps: int, folder: Path) -> Comparison:
    loop = LoopWithOneCall(job.make_model(), folder / "by_hand")
    trainer = job.simple_trainer(folder / "simple", more_hooks=[PutScalarsAtOnce()])
    others = {"SimpleTrainer": partial(Chunks(trainer), steps)}
    work = f"a step with one put_scalars of {MANY}"
    return compare(work, LoopWithOneCall, partial(loop, steps), others, rounds)


# ---------------------------------------------------------------------------- four writers

VALUES: dict[str, Any] = {f"loss_{n}": 0.5 for n in range(7)}


class LoopWithFourWriters(HandWrittenLoop):
    """No model: it stores 8 scalars per step, and writes them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(job.make_model(), folder)
        self.record = FourWriters(folder)

    def step(self) -> None:
        self.record.store(self.iteration, {**VALUES, "time": 1e-3})
        self.record.write(self.iteration)
        self.iteration += 1


class FourWriters(Record):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.csv_file = open(folder / "metrics.csv", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.csv_writer = csv.writer(self.csv_file)
        self.summary_writer: Any = SummaryWriter(str(folder))

    def __del__(self) -> None:
        super().__del__()
        self.csv_file.close()
        self.summary_writer.close()

    def write(self, iteration: int) -> None:
        smoothed = self.smooth()
        self.write_console(iteration, smoothed)
        self.write_json(iteration, smoothed)
        self.csv_writer.writerows(
            (iteration, "", name, repr(value)) for name, value in smoothed.items()
        )
        for name, value in smoothed.items():
            self.summary_writer.add_scalar(name, value, iteration)


class OnlyScalars(TrainerBase):
    def run_step(self) -> None:
        self.storage.put_scalars(**VALUES, time=1e-3)


def _four_writers(rounds: int, steps: int, folder: Path) -> Comparison:
    loop = LoopWithFourWriters(folder / "by_hand")
    trainer = OnlyScalars()
    names = ["csv", "tensorboard"]
    writers = job.make_writers(folder) + default_writers(folder, job.MAX_ITER, names)
    trainer.register_hooks([hooks.PeriodicWriter(writers, period=1)])
    others = {"PeriodicWriter": partial(Chunks(trainer), steps)}
    work = "a write with four writers"
    return compare(work, LoopWithFourWriters, partial(loop, steps), others, rounds)
