"""https://lightning.ai/docs/pytorch: a LightningModule and a callback, without bar and checkpoints."""

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks import job
from benchmarks.by_hand import Record


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = job.make_model()

    def training_step(self, batch: job.Batch, batch_idx: int) -> dict[str, torch.Tensor]:
        losses = self.model(batch)
        return {"loss": losses["loss_mse"] + losses["loss_l1"], **losses}

    def configure_optimizers(self) -> Any:
        optimizer = job.make_optimizer(self.model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, job.schedule)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Handlers(pl.Callback):
    def __init__(self, record: Record) -> None:
        self.record = record
        self.end = time.perf_counter()

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.data_time = time.perf_counter() - self.end

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        iteration = trainer.global_step - 1
        values = {
            "total_loss": outputs["loss"].item(),
            "loss_mse": outputs["loss_mse"].item(),
            "loss_l1": outputs["loss_l1"].item(),
            "data_time": self.data_time,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "time": time.perf_counter() - self.end,
        }
        if not math.isfinite(values["total_loss"]):
            raise FloatingPointError(f"the loss is not finite: {values}")
        self.record.store(iteration, values)
        if (iteration + 1) % job.LOG_PERIOD == 0:
            self.record.write(iteration)
        self.end = time.perf_counter()
        if iteration + 1 == job.LOG_PERIOD:
            self.clock = self.end


def make(folder: Path) -> Callable[[int], float]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module()
    batches = job.EndlessBatches()
    record = Record(folder)

    def run(steps: int) -> float:
        handlers = Handlers(record)
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=job.LOG_PERIOD + steps,
            logger=False,
            callbacks=[handlers],
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, batches)
        return (handlers.end - handlers.clock) / steps

    return run
