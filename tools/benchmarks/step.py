"""What a step costs over that of a bare loop."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks import job
from benchmarks.measure import Row, alternate, compare

StepRunner = Callable[[int], float]
"""Does so many steps; returns the seconds of one."""


def step(
    rounds: int = 31,
    *,
    scratch: Path,
    steps: int = 400,
    peers: Mapping[str, Callable[[Path], StepRunner]] | None = None,
) -> list[Row]:
    """Each trainer over the bare loop; peers, by name, have no goal."""
    goals = dict.fromkeys(job.TRAINERS, 1.10)
    with job.one_thread(), job.logging_to(scratch):
        runners: dict[str, StepRunner] = {"bare loop": job.bare_loop()}
        runners |= {name: job.Chunks(make(scratch / name)) for name, make in job.TRAINERS.items()}
        runners |= {name: make(scratch) for name, make in (peers or {}).items()}
        found = alternate({name: partial(run, steps) for name, run in runners.items()}, rounds)
    del runners["bare loop"]
    return [compare(f"step: {name}", found, name, "bare loop", goals.get(name)) for name in runners]
