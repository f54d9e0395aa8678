"""What exchanging the metrics of two ranks costs."""

import copy
import itertools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

from benchmarks import job
from benchmarks.measure import Row, alternate, compare
from trainkit.engine import create_ddp_model, launch
from trainkit.utils import comm

_Found = dict[str, dict[str, list[float]]]

_EXCHANGED, _NEVER = "exchanged once per log period", "never stored"


def ranks(rounds: int = 45, *, scratch: Path, steps: int = 130, width: int = 1024) -> list[Row]:
    """`SimpleTrainer` on two processes over Gloo, under DDP, with the exchange period of `DefaultTrainer`; over never.

    The model is that of the step rows, whose step is little more than one exchange, and one with some layers of
    ``width``, of which a twentieth of the steps is timed. The hooks are those of the step rows, the writers on rank 0.
    A step takes the time of the slower rank.
    """
    models = {"": (job.make_model(), steps), " of a larger model": (_Wide(width), max(1, steps // 20))}
    run = partial(launch, _measure, 2, args=(models, rounds, scratch))
    found = _without_gpus(run) if torch.cuda.is_available() else run()
    return [
        compare(f"metric exchange on two ranks{of}", times, _EXCHANGED, _NEVER, 1.05) for of, times in found.items()
    ]


class _Wide(job.TinyModel):
    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [16, width, width, width, 16]
        pairs = itertools.pairwise(widths)
        self.linear = nn.Sequential(*(layer for pair in pairs for layer in (nn.Linear(*pair), nn.Tanh())))


def _without_gpus(run: Callable[[], _Found]) -> _Found:
    """In a process that finds none, so that the ranks talk over Gloo."""
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(run).result()


def _measure(models: Mapping[str, tuple[nn.Module, int]], rounds: int, scratch: Path) -> _Found:
    """In every process, which alternate in step: of what model -> what `alternate` has found."""
    found = {}
    folder = scratch / f"rank{comm.get_rank()}"
    with job.one_thread(), job.logging_to(folder):
        for of, (model, steps) in models.items():
            runners = {}
            for name, period in ((_EXCHANGED, 1), (_NEVER, job.MAX_ITER)):
                trainer = job.simple_trainer(
                    folder / of / name,
                    gather_metric_period=period,
                    exchange_period=job.LOG_PERIOD,
                    model=copy.deepcopy(model),
                    wrap=create_ddp_model,
                )
                runners[name] = partial(_slowest, job.Chunks(trainer), steps)
            found[of] = alternate(runners, rounds)
    return found


def _slowest(chunks: job.Chunks, steps: int) -> float:
    return max(comm.all_gather(chunks(steps)))
