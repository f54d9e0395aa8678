"""https://docs.pytorch.org/ignite: an Engine, a handler for the schedule, and handlers of ours."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ignite.engine import Engine, Events
from ignite.handlers import LRScheduler

from benchmarks import job
from benchmarks.by_hand import Record


class Run:
    """The engine with its handlers."""

    def __init__(self, folder: Path) -> None:
        self.model = job.make_model().train()
        self.optimizer = job.make_optimizer(self.model)
        self.record = Record(folder)
        self.data_time = 0.0
        self.engine = Engine(self.update)
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, job.schedule)
        self.engine.add_event_handler(Events.GET_BATCH_STARTED, self.start_step)
        self.engine.add_event_handler(Events.GET_BATCH_COMPLETED, self.end_fetch)
        self.engine.add_event_handler(Events.ITERATION_COMPLETED, self.store)
        self.engine.add_event_handler(Events.ITERATION_COMPLETED, LRScheduler(scheduler))
        write_period = Events.ITERATION_COMPLETED(every=job.LOG_PERIOD)
        self.engine.add_event_handler(write_period, self.write)
        after_first_period = Events.ITERATION_COMPLETED(once=job.LOG_PERIOD)
        self.engine.add_event_handler(after_first_period, self.start_clock)

    def update(self, engine: Engine, batch: job.Batch) -> dict[str, float]:
        losses = self.model(batch)
        total = losses["loss_mse"] + losses["loss_l1"]
        self.optimizer.zero_grad()
        total.backward()
        values = {name: loss.item() for name, loss in losses.items()}
        values["total_loss"] = sum(values.values())
        if not math.isfinite(values["total_loss"]):
            raise FloatingPointError(f"the loss is not finite: {values}")
        self.optimizer.step()
        return values

    def start_step(self, engine: Engine) -> None:
        self.start = time.perf_counter()

    def end_fetch(self, engine: Engine) -> None:
        self.data_time = time.perf_counter() - self.start

    def store(self, engine: Engine) -> None:
        values = engine.state.output
        values["data_time"] = self.data_time
        values["lr"] = self.optimizer.param_groups[0]["lr"]
        values["time"] = time.perf_counter() - self.start
        self.record.store(engine.state.iteration - 1, values)

    def write(self, engine: Engine) -> None:
        self.record.write(engine.state.iteration - 1)

    def start_clock(self, engine: Engine) -> None:
        self.clock = time.perf_counter()

    def __call__(self, steps: int) -> float:
        length = job.LOG_PERIOD + steps
        self.engine.run(job.make_batches(), max_epochs=1, epoch_length=length)
        return (time.perf_counter() - self.clock) / steps


def make(folder: Path) -> Callable[[int], float]:
    return Run(folder)
