"""The time from the start of a resume to the first batch, early and late in a run.

The model has ten million parameters, with SGD and momentum; the data set has 5,000 samples. By hand:
torch.load, the states of model, optimizer and schedule, the histories, the random state, and the
order of the present epoch from its seed.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import job
from benchmarks.measure import Comparison, compare, one_thread
from trainkit.config import CfgNode, get_cfg
from trainkit.data import build_train_loader
from trainkit.engine import DefaultTrainer, HookBase

ROUNDS = 15
EARLY = 10
LATE = 5_000_000
BATCH_SIZE = 16
NUM_SAMPLES = 5000
HISTORY_LENGTH = 10_000  # values that a history of trainkit holds


class Model(nn.Module):
    """``first_batch`` is the time of its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 3072), nn.ReLU(), nn.Linear(3072, 3072), nn.ReLU(), nn.Linear(3072, 1)
        )
        self.first_batch: float | None = None

    def forward(self, batch: list[Tensor]) -> Tensor:
        if self.first_batch is None:
            self.first_batch = time.perf_counter()
        outputs = self.layers(batch[0])
        return outputs.square().mean()


def make_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(NUM_SAMPLES, 64, generator=generator))


def measure(rounds: int, scratch: Path, quick: bool) -> list[Comparison]:
    late = 1000 if quick else LATE
    comparisons = []
    with one_thread(), job.logging_to(scratch):
        for num_workers in (0, 2):
            ways = {}
            for iteration in (EARLY, late):
                cfg = _make_config(scratch / f"{iteration}_{num_workers}", num_workers)
                save_at(iteration, cfg)
                ways[f"DefaultTrainer, after {iteration:,} iterations"] = partial(_resume, cfg)
            path = scratch / "by_hand.pth"
            _save_by_hand(late, path)
            twin = partial(resume_by_hand, path, num_workers)
            work = f"resume, {num_workers} workers"
            comparisons.append(compare(work, resume_by_hand, twin, ways, rounds))
    return comparisons


# ---------------------------------------------------------------------------- by hand


def resume_by_hand(path: Path, num_workers: int) -> float:
    """The seconds until the first batch."""
    model = Model()
    optimizer = job.make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, job.schedule)
    dataset = make_dataset()

    start = time.perf_counter()
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    histories = {name: list(values) for name, values in state["histories"].items()}
    torch.set_rng_state(state["rng"])
    epoch, offset = divmod(state["samples"], NUM_SAMPLES)
    generator = torch.Generator().manual_seed(epoch)
    indices = torch.randperm(NUM_SAMPLES, generator=generator).tolist()[offset:]
    loader = DataLoader(dataset, BATCH_SIZE, sampler=indices, num_workers=num_workers)
    model(next(iter(loader)))
    assert model.first_batch is not None
    assert len(histories) == 8
    return model.first_batch - start


def _save_by_hand(iteration: int, path: Path) -> None:
    model = Model()
    optimizer = job.make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, job.schedule)
    model([torch.zeros(1, 64)]).backward()
    optimizer.step()
    length = min(iteration, HISTORY_LENGTH)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "histories": {f"scalar_{n}": [0.5] * length for n in range(8)},
        "rng": torch.get_rng_state(),
        "samples": iteration * BATCH_SIZE,
    }
    torch.save(state, path)


# ---------------------------------------------------------------------------- trainkit


class Run(DefaultTrainer):
    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        return Model()

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        return job.make_optimizer(model)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        return build_train_loader(cfg, make_dataset())


class StopAtOnce(HookBase):
    def after_step(self) -> None:
        self.trainer.request_stop("it has had its first batch")


class Past(HookBase):
    """Fills the histories of a run that starts late, as if it had done the earlier steps."""

    def before_train(self) -> None:
        end = self.trainer.start_iter
        names = ("total_loss", "data_time", "rank_data_time", "time")
        for iteration in range(max(0, end - HISTORY_LENGTH), end):
            self.trainer.storage.put_scalars(cur_iter=iteration, **dict.fromkeys(names, 0.5))


def save_at(iteration: int, cfg: CfgNode) -> None:
    """Save a checkpoint as if a run had done this many iterations, at their position in the data."""
    trainer = Run(cfg)
    trainer.register_hooks([Past(), StopAtOnce()])
    loader: Any = trainer.data_loader
    loader.sampler.set_position((iteration - 1) * BATCH_SIZE)
    trainer.train(start_iter=iteration - 1)


def _make_config(output_dir: Path, num_workers: int) -> CfgNode:
    cfg = get_cfg()
    cfg.OUTPUT_DIR = str(output_dir)
    cfg.MODEL.DEVICE = "cpu"
    cfg.SEED = 1
    cfg.DATALOADER.NUM_WORKERS = num_workers
    cfg.SOLVER.MAX_ITER = job.MAX_ITER
    cfg.SOLVER.CHECKPOINT_PERIOD = job.MAX_ITER
    cfg.SOLVER.IMS_PER_BATCH = BATCH_SIZE
    cfg.SOLVER.LR_SCHEDULER_NAME = "WarmupCosineLR"
    cfg.CHECKPOINT.MAX_TO_KEEP = 1
    cfg.LOG.WRITERS = ["console", "json"]
    return cfg


def _resume(cfg: CfgNode) -> float:
    """The seconds until the first batch. The run saves one iteration later."""
    trainer = Run(cfg)
    trainer.register_hooks([StopAtOnce()])
    start = time.perf_counter()
    trainer.resume_or_load()
    trainer.train()
    model: Any = trainer.model
    first_batch: float = model.first_batch
    return first_batch - start
