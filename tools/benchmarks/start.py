"""The start of a run: imports, and the memory of a sampler.

Imports are timed in a new interpreter, from bytecode. The very first start also compiles the
sources, which takes another 0.1 to 0.2 s. The sampler draws the first index of an epoch of
10,000,000.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import RandomSampler

from benchmarks.measure import Comparison, by_hand, compare, in_new_process, resident_mib, timed
from trainkit.data.samplers import TrainingSampler

ROUNDS = 9

_ROOT = Path(__file__).resolve().parents[2]

TRAINKIT = (
    "from trainkit.engine import DefaultTrainer; from trainkit.config import get_cfg; get_cfg()"
)
OTHERS = {
    "Ignite": "import ignite.engine, ignite.handlers",
    "Lightning": "import lightning.pytorch",
}


def import_by_hand() -> None:
    """What a plain loop imports."""
    run_python("import torch, torch.utils.data")


def measure(rounds: int, scratch: Path, quick: bool) -> list[Comparison]:
    others = {"with trainkit": timed(partial(import_with_torch, TRAINKIT))}
    if not quick:
        for name, code in OTHERS.items():
            if importlib.util.find_spec(name.lower()) is not None:
                others[f"with {name}"] = timed(partial(import_with_torch, code))
    work = "a new process that imports torch"
    imports = compare(work, import_by_hand, timed(import_by_hand), others, rounds)
    return [imports, _memory_of_sampler(1000 if quick else 10_000_000)]


def import_with_torch(code: str) -> None:
    run_python(f"import torch; {code}")


def run_python(code: str) -> None:
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=_ROOT, env=environment, check=True)


# ---------------------------------------------------------------------------- sampler


def shuffle_by_hand(size: int) -> Iterator[int]:
    indices = torch.randperm(size)
    for place in range(size):  # iterating over the tensor would make a tensor of each number first
        yield int(indices[place])


def trainkits_sampler(size: int) -> Iterator[int]:
    return iter(TrainingSampler(size, seed=0))


def torchs_sampler(size: int) -> Iterator[int]:
    return iter(RandomSampler(range(size)))


def _memory_of_sampler(size: int) -> Comparison:
    makers: dict[str, Callable[[int], Iterator[int]]] = {
        by_hand(shuffle_by_hand): shuffle_by_hand,
        "TrainingSampler": trainkits_sampler,
        "torch's RandomSampler": torchs_sampler,
    }
    found = {name: [in_new_process(growth_mib, make, size)] for name, make in makers.items()}
    return Comparison(f"memory of {size:,} indices", shuffle_by_hand, found, "MiB")


def growth_mib(make: Callable[[int], Iterator[int]], size: int) -> float:
    """By how much the process grows until the first index is there."""
    next(make(10))
    before = resident_mib()
    indices = make(size)
    next(indices)
    return resident_mib() - before
