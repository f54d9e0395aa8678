"""https://mmengine.readthedocs.io: a Runner with its default hooks, which log every 20 iterations."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import Hook  # type: ignore[import-not-found]
from mmengine.model import BaseModel  # type: ignore[import-not-found]
from mmengine.runner import Runner  # type: ignore[import-not-found]

from benchmarks import job


class _Model(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.model = job.make_model()

    def forward(self, *batch: torch.Tensor, mode: str) -> dict[str, torch.Tensor]:
        return self.model(batch)


class _Clock(Hook):
    priority = "LOWEST"

    def after_train_iter(self, runner: Any, batch_idx: int, **kwargs: Any) -> None:
        if runner.iter + 1 == job.LOG_PERIOD:  # the iteration is not counted yet
            self.begin = time.perf_counter()
        self.end = time.perf_counter()


def make(scratch: Path) -> Callable[[int], float]:
    model = _Model()
    batches = job.PlainLoader()

    def run(steps: int) -> float:
        clock = _Clock()
        runner = Runner(
            model,
            work_dir=str(scratch / "mmengine"),
            train_dataloader=batches,
            train_cfg={"by_epoch": False, "max_iters": job.LOG_PERIOD + steps},
            optim_wrapper={"optimizer": job.make_optimizer(model)},
            param_scheduler={"type": "CosineAnnealingLR", "T_max": job.MAX_ITER, "by_epoch": False},
            default_hooks={
                "logger": {"type": "LoggerHook", "interval": job.LOG_PERIOD},
                "checkpoint": None,
                "sampler_seed": None,  # there is no sampler
            },
            custom_hooks=[clock],
            log_processor={"by_epoch": False},
            experiment_name=f"chunk_{time.monotonic_ns()}",  # no two runners may have the same name
        )
        runner.train()
        return (clock.end - clock.begin) / steps

    return run
