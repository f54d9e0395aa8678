"""The time of a step, compared with a bare loop."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trainkit.projects.non_finite.policies import SkipNonFinite

from benchmarks import job
from benchmarks.measure import Row, alternate, compare
from trainkit.engine import TrainerBase

StepRunner = Callable[[int], float]
"""Called with a number of steps: does them, and returns the seconds of one."""

SKIP = "SimpleTrainer, skip"
DEEP: dict[str, Callable[..., TrainerBase]] = {
    "SimpleTrainer, 100 tensors": lambda folder: job.simple_trainer(
        folder, model=job.make_model(job.DeepModel)
    ),
    "DefaultTrainer, 100 tensors": partial(job.default_trainer, trainer_class=job.DeepTrainer),
}


def _skipping_trainer(*args: Any, **kwargs: Any) -> TrainerBase:
    return job.simple_trainer(*args, non_finite=SkipNonFinite(), **kwargs)


def step(
    rounds: int = 31,
    *,
    scratch: Path,
    steps: int = 400,
    peers: Mapping[str, Callable[[Path], StepRunner]] | None = None,
) -> list[Row]:
    """Each trainer compared with the bare loop, for a tiny model and a model of 100 tensors; peers have no goal."""
    tiny: dict[str, Callable[..., TrainerBase]] = {
        **job.TRAINERS,
        SKIP: _skipping_trainer,
    }
    goals = {
        **dict.fromkeys(job.TRAINERS, 1.10),
        job.CONSOLE: 1.15,
        job.ASYNC: 1.15,
        SKIP: 1.20,
        **dict.fromkeys(DEEP, 1.02),
    }
    with job.one_thread(), job.logging_to(scratch):
        runners: dict[str, StepRunner] = {
            name: job.Chunks(make(scratch / name)) for name, make in tiny.items()
        }
        runners |= {name: make(scratch) for name, make in (peers or {}).items()}
        found = _compare({"bare loop": job.bare_loop(), **runners}, steps, rounds, goals)
        deep: dict[str, StepRunner] = {
            name: job.Chunks(make(scratch / name)) for name, make in DEEP.items()
        }
        return found + _compare(
            {"bare loop, 100 tensors": job.bare_loop(job.DeepModel), **deep}, steps, rounds, goals
        )


def _compare(
    runners: Mapping[str, StepRunner], steps: int, rounds: int, goals: Mapping[str, float]
) -> list[Row]:
    """Compare all runners with the first one."""
    base, *others = runners
    found = alternate({name: partial(run, steps) for name, run in runners.items()}, rounds)
    return [compare(f"step: {name}", found, name, base, goals.get(name)) for name in others]
