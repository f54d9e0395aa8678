"""A step of training, beside a loop written by hand that does the same work.

The model is a linear layer of 16 x 16 with two losses, for batches of 8, with SGD and momentum.
Each step times itself and the data, checks that the loss is finite, stores each loss with its
iteration, and steps the schedule. Every 20 steps it writes a console line and a JSON line. The bare
loop does only the updates. "detectron2's shape" is its loop, hooks and storage, written anew from
its design, because it is not on the package index. All other libraries store and write through the
same code as the loop by hand, in their own handlers.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from trainkit.projects.non_finite.policies import SkipNonFinite

from benchmarks import job, peers
from benchmarks.by_hand import (
    AccumulatingLoop,
    BareLoop,
    HalfPrecisionLoop,
    HandWrittenLoop,
    SkippingLoop,
)
from benchmarks.job import Chunks, StepRunner
from benchmarks.measure import Comparison, compare, one_thread
from trainkit.engine import AMPTrainer

ROUNDS = 31


def measure(rounds: int, scratch: Path, quick: bool) -> list[Comparison]:
    steps = 2 if quick else 400
    with one_thread(), job.logging_to(scratch):
        return [
            _tiny(rounds, steps, scratch / "tiny"),
            _deep(rounds, steps // 4 + 1, scratch / "deep"),
            _skip(rounds, steps, scratch / "skip", job.TinyModel, "the tiny model"),
            _skip(rounds, steps // 4 + 1, scratch / "deep_skip", job.DeepModel, "100 tensors"),
            _half_precision(rounds, steps, scratch / "half"),
            _accumulation(rounds, steps // 2 + 1, scratch / "accumulation"),
        ]


def _compare(
    work: str,
    loop: HandWrittenLoop,
    others: Mapping[str, StepRunner],
    rounds: int,
    steps: int,
) -> Comparison:
    ways = {name: partial(run, steps) for name, run in others.items()}
    return compare(work, type(loop), partial(loop, steps), ways, rounds)


def _tiny(rounds: int, steps: int, folder: Path) -> Comparison:
    loop = HandWrittenLoop(job.make_model(), folder / "by_hand")
    asynchronous = job.simple_trainer(folder / "asynchronous", async_write_metrics=True)
    others: dict[str, StepRunner] = {
        "bare loop": BareLoop(job.make_model()),
        "SimpleTrainer": Chunks(job.simple_trainer(folder / "simple")),
        "DefaultTrainer": Chunks(job.default_trainer(folder / "default")),
        "SimpleTrainer, asynchronous metrics": Chunks(asynchronous),
    }
    for name, module in peers.PEERS.items():
        make = peers.find(module)
        if make is None:
            print(f"{name} is not installed and has no row", file=sys.stderr)
        else:
            others[name] = make(folder / module)
    return _compare("a step of the tiny model", loop, others, rounds, steps)


def _deep(rounds: int, steps: int, folder: Path) -> Comparison:
    loop = HandWrittenLoop(job.make_model(job.DeepModel), folder / "by_hand")
    simple = job.simple_trainer(folder / "simple", model=job.make_model(job.DeepModel))
    default = job.default_trainer(folder / "default", job.DeepJobTrainer)
    others: dict[str, StepRunner] = {
        "bare loop": BareLoop(job.make_model(job.DeepModel)),
        "SimpleTrainer": Chunks(simple),
        "DefaultTrainer": Chunks(default),
    }
    return _compare("50 layers, 100 tensors", loop, others, rounds, steps)


def _skip(
    rounds: int, steps: int, folder: Path, model_class: type[job.TinyModel], of: str
) -> Comparison:
    loop = SkippingLoop(job.make_model(model_class), folder / "by_hand")
    model = job.make_model(model_class)
    trainer = job.simple_trainer(folder / "simple", model=model, non_finite=SkipNonFinite())
    others: dict[str, StepRunner] = {"SimpleTrainer": Chunks(trainer)}
    return _compare(f"policy skip, {of}", loop, others, rounds, steps)


def _half_precision(rounds: int, steps: int, folder: Path) -> Comparison:
    loop = HalfPrecisionLoop(job.make_model(), folder / "by_hand")
    trainer = job.simple_trainer(folder / "amp", trainer_class=AMPTrainer, precision=torch.bfloat16)
    others: dict[str, StepRunner] = {"AMPTrainer": Chunks(trainer)}
    return _compare("mixed precision, bfloat16", loop, others, rounds, steps)


def _accumulation(rounds: int, steps: int, folder: Path) -> Comparison:
    loop = AccumulatingLoop(job.make_model(), folder / "by_hand")
    trainer = job.simple_trainer(folder / "simple", accumulation_steps=loop.micro_batches)
    others: dict[str, StepRunner] = {"SimpleTrainer": Chunks(trainer)}
    return _compare("four batches per step", loop, others, rounds, steps)
