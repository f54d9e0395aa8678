"""https://mmengine.readthedocs.io: a Runner with its default hooks, which time, store and write."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner

from benchmarks import job


class Model(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.model = job.make_model()

    def forward(self, *batch: torch.Tensor, mode: str) -> dict[str, torch.Tensor]:
        losses: dict[str, torch.Tensor] = self.model(batch)
        return losses


class Clock(Hook):
    """Checks the loss, and times the steps after the first log period."""

    priority = "LOWEST"

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if not math.isfinite(outputs["loss"].item()):
            raise FloatingPointError(f"the loss is not finite: {outputs}")
        if runner.iter + 1 == job.LOG_PERIOD:  # the iteration is not counted yet
            self.start = time.perf_counter()
        self.end = time.perf_counter()


def make(folder: Path) -> Callable[[int], float]:
    model = Model()
    optimizer = job.make_optimizer(model)
    batches = job.EndlessBatches()

    def run(steps: int) -> float:
        clock = Clock()
        runner = Runner(
            model,
            work_dir=str(folder),
            train_dataloader=batches,
            train_cfg={"by_epoch": False, "max_iters": job.LOG_PERIOD + steps},
            optim_wrapper={"optimizer": optimizer},
            param_scheduler={"type": "CosineAnnealingLR", "T_max": job.MAX_ITER, "by_epoch": False},
            default_hooks={
                "logger": {"type": "LoggerHook", "interval": job.LOG_PERIOD},
                "checkpoint": None,
                "sampler_seed": None,  # there is no sampler
            },
            custom_hooks=[clock],
            log_processor={"by_epoch": False},
            visualizer={"type": "Visualizer", "vis_backends": [{"type": "LocalVisBackend"}]},
            experiment_name=f"chunk_{time.monotonic_ns()}",  # no two runners have the same name
        )
        runner.train()
        return (clock.end - clock.start) / steps

    return run
