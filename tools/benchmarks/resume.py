"""The time until a resumed run has its first batch, early and late in a run."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.history import Past
from benchmarks.job import MAX_ITER, logging_to, one_thread
from benchmarks.measure import Row, Runner, alternate, compare
from trainkit.config import CfgNode, get_cfg
from trainkit.data import build_train_loader
from trainkit.engine import DefaultTrainer, HookBase

_LATE, _EARLY = 10_000_000, 10
_BATCH_SIZE = 16


class _Model(nn.Module):
    """About ten million parameters, like a small ResNet. ``first_batch`` is the time of its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 3072), nn.ReLU(), nn.Linear(3072, 3072), nn.ReLU(), nn.Linear(3072, 1)
        )
        self.first_batch: float | None = None

    def forward(self, batch: list[Tensor]) -> Tensor:
        if self.first_batch is None:
            self.first_batch = time.perf_counter()
        return self.layers(batch[0]).square().mean()


class _Run(DefaultTrainer):
    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        return _Model()

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        dataset = TensorDataset(torch.randn(5000, 64, generator=torch.Generator().manual_seed(0)))
        return build_train_loader(cfg, dataset)


class _StopAtOnce(HookBase):
    def after_step(self) -> None:
        self.trainer.request_stop("it has had its first batch")


def resume(
    rounds: int = 15, *, scratch: Path, late: int = _LATE, workers: Sequence[int] = (0, 2)
) -> list[Row]:
    """From the call of resume_or_load to the first batch: a run after ``late`` iterations, compared with one after 10.

    Histories and the data position are those of such a run. Every round continues from the checkpoint of the previous
    round, one iteration later.
    """
    rows = []
    with one_thread(), logging_to(scratch):
        for num_workers in workers:
            runners: dict[str, Runner] = {}
            for iteration in (late, _EARLY):
                cfg = _cfg(scratch / f"{iteration}_{num_workers}", num_workers)
                _save_at(iteration, cfg)
                runners[f"at {iteration:,}"] = partial(_resume, cfg)
            found = alternate(runners, rounds)
            measured, base = runners
            rows.append(
                compare(f"resume, {num_workers} loader workers", found, measured, base, 1.1)
            )
    return rows


def _cfg(output_dir: Path, num_workers: int) -> CfgNode:
    cfg = get_cfg()
    cfg.OUTPUT_DIR, cfg.MODEL.DEVICE, cfg.SEED = str(output_dir), "cpu", 1
    cfg.DATALOADER.NUM_WORKERS = num_workers
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.CHECKPOINT_PERIOD, cfg.SOLVER.IMS_PER_BATCH = (
        MAX_ITER,
        MAX_ITER,
        _BATCH_SIZE,
    )
    cfg.SOLVER.LR_SCHEDULER_NAME = "WarmupCosineLR"
    cfg.CHECKPOINT.MAX_TO_KEEP = 1
    cfg.LOG.WRITERS = ["console", "json"]
    return cfg


def _save_at(iteration: int, cfg: CfgNode) -> None:
    """Save a checkpoint as if a run had done this many iterations: it starts there, at their position in the data."""
    trainer = _Run(cfg)
    trainer.register_hooks([Past(most=30_000), _StopAtOnce()])  # more steps than a history holds
    loader: Any = trainer.data_loader
    loader.sampler.set_position((iteration - 1) * _BATCH_SIZE)
    trainer.train(start_iter=iteration - 1)


def _resume(cfg: CfgNode) -> float:
    trainer = _Run(cfg)
    trainer.register_hooks([_StopAtOnce()])
    begin = time.perf_counter()
    trainer.resume_or_load()
    trainer.train()
    model: Any = trainer.model
    return model.first_batch - begin
