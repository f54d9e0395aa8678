"""https://lightning.ai/docs/pytorch/stable/common/trainer.html, without progress bar and checkpoints."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl  # type: ignore[import-not-found]
import torch
from lightning.pytorch.loggers import CSVLogger  # type: ignore[import-not-found]

from benchmarks import job


class _Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = job.make_model()

    def training_step(self, batch: job.Batch, batch_idx: int) -> torch.Tensor:
        losses = self.model(batch)
        self.log_dict(losses)
        return losses["loss_mse"] + losses["loss_l1"]

    def configure_optimizers(self) -> Any:
        optimizer = job.make_optimizer(self.model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, job.schedule)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class _Clock(pl.Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == job.LOG_PERIOD:
            self.begin = time.perf_counter()
        self.end = time.perf_counter()


def make(scratch: Path) -> Callable[[int], float]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module, batches = _Module(), job.PlainLoader()

    def run(steps: int) -> float:
        clock = _Clock()
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=job.LOG_PERIOD + steps,
            log_every_n_steps=job.LOG_PERIOD,
            logger=CSVLogger(scratch, name="lightning"),
            callbacks=[clock],
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, batches)
        return (clock.end - clock.begin) / steps

    return run
