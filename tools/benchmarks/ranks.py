"""The cost of exchanging the metrics of two ranks."""

import copy
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from trainkit.projects.logical_ranks.trainer import LogicalTrainer

from benchmarks import job
from benchmarks.measure import Row, alternate, compare
from trainkit.engine import SimpleTrainer, create_ddp_model, launch
from trainkit.utils import comm

_Found = dict[str, dict[str, list[float]]]

_EXCHANGED, _NEVER = "exchanged once per log period", "never stored"
_LOGICAL, _PLAIN, _LOGICAL_RANKS = "in one tree", "as usual", 4


def ranks(rounds: int = 45, *, scratch: Path, steps: int = 130, width: int = 1024) -> list[Row]:
    """`SimpleTrainer` with DDP on two processes over Gloo: the exchange period of `DefaultTrainer`, and no exchange.

    One model is that of the step rows, whose step takes little longer than one exchange. The other has some layers of
    ``width``; only a twentieth of the steps is timed. The hooks are those of the step rows, the writers are on rank 0.
    A step takes the time of the slower rank.
    """
    models = {
        "": (job.make_model(), steps),
        " of a larger model": (_Wide(width), max(1, steps // 20)),
    }
    found = _run(scratch / "found.json", 2, _measure, models, rounds, scratch)
    return [
        compare(f"metric exchange on two ranks{of}", times, _EXCHANGED, _NEVER, 1.03)
        for of, times in found.items()
    ]


def logical(
    rounds: int = 15,
    *,
    scratch: Path,
    steps: int = 60,
    width: int = 1024,
    batch: int = 32,
    counts: Sequence[int] = (1, 2, _LOGICAL_RANKS),
) -> list[Row]:
    """A step with `_LOGICAL_RANKS` logical ranks, compared with a step of DDP that accumulates the same micro-batches.

    The models are a small one of 50 layers and one of two million parameters; each logical rank has ``batch`` samples.
    ``counts``: numbers of processes.
    """
    models = {
        "a small model": (job.make_model(job.DeepModel), steps),
        "two million parameters": (_Wide(width), steps),
    }
    rows = []
    for processes in counts:
        arguments = models, rounds, scratch / str(processes), batch
        found = _run(scratch / "found.json", processes, _measure_logical, *arguments)
        on = f"{processes} process{'es' * (processes > 1)}"
        rows += [
            compare(f"logical ranks on {on}, {of}", times, _LOGICAL, _PLAIN, 1.25)
            for of, times in found.items()
        ]
    return rows


def _measure_logical(
    models: Mapping[str, tuple[nn.Module, int]], rounds: int, scratch: Path, batch: int
) -> dict[str, dict[str, list[float]]]:
    """As `_measure`."""
    found = {}
    folder = scratch / f"rank{comm.get_rank()}"
    per_process = _LOGICAL_RANKS // comm.get_world_size()
    with job.one_thread(), job.logging_to(folder):
        for of, (model, steps) in models.items():
            runners = {}
            for name in (_LOGICAL, _PLAIN):
                wrapped = create_ddp_model(copy.deepcopy(model))
                arguments = (
                    wrapped,
                    _Batches(job.make_batches(size=batch)),
                    job.make_optimizer(wrapped),
                )
                options: Any = {"exchange_period": job.LOG_PERIOD}
                if name == _LOGICAL:
                    comm.set_data_ranks(comm.get_rank(), _LOGICAL_RANKS)
                    trainer: SimpleTrainer = LogicalTrainer(*arguments, **options)
                    comm.set_data_ranks()
                else:
                    trainer = SimpleTrainer(*arguments, **options, accumulation_steps=per_process)
                job.register_hooks(trainer, folder / of / name)
                runners[name] = partial(_slowest, job.Chunks(trainer), steps)
            found[of] = alternate(runners, rounds)
    return found


class _Batches(list[job.Batch]):
    logical_ranks, seed = _LOGICAL_RANKS, 0


class _Wide(job.TinyModel):
    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [16, width, width, width, 16]
        pairs = itertools.pairwise(widths)
        self.linear = nn.Sequential(
            *(layer for pair in pairs for layer in (nn.Linear(*pair), nn.Tanh()))
        )


def _run(file: Path, processes: int, measure: Callable[..., _Found], *arguments: Any) -> _Found:
    """What ``measure(*arguments)`` returns on rank 0 of so many processes; they use no GPU."""
    run = partial(launch, _save, processes, args=(file, measure, arguments))
    if torch.cuda.is_available():
        with (
            patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""),
            ProcessPoolExecutor(1, get_context("spawn")) as pool,
        ):
            pool.submit(run).result()
    else:
        run()
    found: _Found = json.loads(file.read_text())
    return found


def _save(file: Path, measure: Callable[..., _Found], arguments: Sequence[Any]) -> None:
    found = measure(*arguments)
    if comm.is_main_process():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))


def _measure(models: Mapping[str, tuple[nn.Module, int]], rounds: int, scratch: Path) -> _Found:
    """model -> the times from `alternate`; runs in every process, in the same order."""
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
