"""Two processes with DDP over Gloo, beside DDP by hand with the same logging.

Both average the losses over the ranks once per 20 steps, in one exchange, and rank 0 writes. A step
takes the time of the slower rank.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import job
from benchmarks.by_hand import HandWrittenLoop
from benchmarks.job import Chunks
from benchmarks.measure import Comparison, alternate, by_hand, one_thread
from trainkit.engine import create_ddp_model, launch
from trainkit.utils import comm

ROUNDS = 31
PROCESSES = 2

MODELS: dict[str, tuple[type[job.TinyModel], int]] = {
    # name -> class, and timed steps per round
    "the tiny model": (job.TinyModel, 200),
    "two million parameters": (job.WideModel, 20),
}


class LoopOfRank(HandWrittenLoop):
    """Losses wait in a list; every 20 steps they are averaged over the ranks, checked and stored."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        super().__init__(DistributedDataParallel(model), folder)
        self.waiting: list[dict[str, float]] = []

    def update(self, total_loss: float) -> None:
        self.optimizer.step()

    def store(self, values: Mapping[str, float]) -> None:
        self.waiting.append(dict(values))
        if (self.iteration + 1) % job.LOG_PERIOD == 0:
            self.exchange()

    def exchange(self) -> None:
        rows = torch.tensor([list(values.values()) for values in self.waiting], dtype=torch.float64)
        dist.all_reduce(rows)
        names = list(self.waiting[0])
        first = self.iteration + 1 - len(self.waiting)
        means = rows / dist.get_world_size()
        for iteration, row in enumerate(means.tolist(), first):
            values = dict(zip(names, row, strict=True))
            if not math.isfinite(values["total_loss"]):
                raise FloatingPointError(f"a loss is not finite in iteration {iteration}")
            if dist.get_rank() == 0:
                self.record.store(iteration, values)
        if dist.get_rank() == 0:
            self.record.write(self.iteration)
        self.waiting.clear()


def measure(rounds: int, scratch: Path, quick: bool) -> list[Comparison]:
    file = scratch / "found.json"
    launch(_measure_and_save, PROCESSES, args=(file, rounds, scratch, quick))
    comparisons = []
    for name, found in json.loads(file.read_text(encoding="utf-8")).items():
        work = f"a step on two processes, {name}"
        comparisons.append(Comparison(work, LoopOfRank, found))
    return comparisons


def _measure_and_save(file: Path, rounds: int, scratch: Path, quick: bool) -> None:
    """Runs in every process."""
    found = {}
    folder = scratch / f"rank_{comm.get_rank()}"
    with one_thread(), job.logging_to(folder):
        for name, (model_class, steps) in MODELS.items():
            loop = LoopOfRank(job.make_model(model_class), folder / name / "by_hand")
            trainer = job.simple_trainer(
                folder / name / "simple",
                model=create_ddp_model(job.make_model(model_class)),
                exchange_period=job.LOG_PERIOD,
            )
            steps = 2 if quick else steps
            ways = {
                by_hand(LoopOfRank): partial(_slowest, loop, steps),
                "SimpleTrainer": partial(_slowest, Chunks(trainer), steps),
            }
            found[name] = alternate(ways, rounds)
    if comm.is_main_process():
        file.write_text(json.dumps(found), encoding="utf-8")


def _slowest(run: Callable[[int], float], steps: int) -> float:
    return max(comm.all_gather(run(steps)))
