"""https://docs.pytorch.org/ignite: an Engine (its function returns the losses), an LR handler, and log lines."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ignite.engine import Engine, Events  # type: ignore[import-not-found]
from ignite.handlers import LRScheduler  # type: ignore[import-not-found]
from ignite.utils import setup_logger  # type: ignore[import-not-found]

from benchmarks import job


def make(scratch: Path) -> Callable[[int], float]:
    model = job.make_model().train()
    optimizer = job.make_optimizer(model)
    logger = setup_logger("ignite trainer", stream=sys.stdout, filepath=str(scratch / "ignite.txt"))

    def update(engine: Engine, batch: job.Batch) -> dict[str, float]:
        losses = model(batch)
        loss = losses["loss_mse"] + losses["loss_l1"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"total_loss": loss.item(), **{name: value.item() for name, value in losses.items()}}

    def log(engine: Engine) -> None:
        lr = optimizer.param_groups[0]["lr"]
        logger.info("iter %d: %s lr %g", engine.state.iteration, engine.state.output, lr)

    times: dict[str, float] = {}
    trainer = Engine(update)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, job.schedule)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, LRScheduler(schedule))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=job.LOG_PERIOD), log)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=job.LOG_PERIOD),
        lambda: times.update(begin=time.perf_counter()),
    )
    trainer.add_event_handler(Events.COMPLETED, lambda: times.update(end=time.perf_counter()))

    def run(steps: int) -> float:
        trainer.run(job.make_batches(), max_epochs=1, epoch_length=job.LOG_PERIOD + steps)
        return (times["end"] - times["begin"]) / steps

    return run
