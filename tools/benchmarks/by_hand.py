"""Training loops written by hand: the bare loop, and one that does the work of trainkit's step."""

import datetime
import itertools
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import job

logger = logging.getLogger("trainkit.benchmark")  # with the handlers of trainkit's log

_WINDOW = 20
_HISTORY_LENGTH = 10_000  # values, as in trainkit's histories


class BareLoop:
    """Only the updates: nothing is timed, checked, stored or written."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        batches: Iterable[Any] | None = None,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer or job.make_optimizer(model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, job.schedule)
        self.batches: Iterator[Any] = itertools.cycle(job.make_batches())
        if batches is not None:
            self.batches = iter(batches)
        self.finish = finish  # waits for the device
        model.train()

    def __call__(self, steps: int) -> float:
        """Do this number of timed steps, after some that are not; returns the seconds of one."""
        for _ in range(job.LOG_PERIOD):
            self.step()
        self.finish()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.finish()
        return (time.perf_counter() - start) / steps

    def step(self) -> None:
        batch = next(self.batches)
        losses = self.model(batch)
        total = losses["loss_mse"] + losses["loss_l1"]
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()
        self.scheduler.step()


class HandWrittenLoop(BareLoop):
    """The work of trainkit's step.

    It times the data and the step, checks that the loss is finite, stores each loss with its
    iteration, steps the schedule, and writes a console line and a JSON line every 20 steps.
    """

    def __init__(self, model: nn.Module, folder: Path) -> None:
        super().__init__(model)
        self.record = Record(folder)
        self.iteration = 0

    def step(self) -> None:
        start = time.perf_counter()
        losses, data_time = self.compute_gradients()
        values = self.read(losses)
        self.update(values["total_loss"])
        values["data_time"] = data_time
        values["lr"] = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step()
        values["time"] = time.perf_counter() - start
        self.store(values)
        self.iteration += 1

    def compute_gradients(self) -> tuple[dict[str, Tensor], float]:
        """The losses of this step, and the time for which it waited for the data."""
        start = time.perf_counter()
        batch = next(self.batches)
        data_time = time.perf_counter() - start
        losses, total = self.forward(batch)
        self.optimizer.zero_grad()
        self.backward(total)
        return losses, data_time

    def forward(self, batch: Any) -> tuple[dict[str, Tensor], Tensor]:
        losses = self.model(batch)
        return losses, losses["loss_mse"] + losses["loss_l1"]

    def backward(self, total: Tensor) -> None:
        total.backward()

    def read(self, losses: Mapping[str, Tensor]) -> dict[str, float]:
        values = {name: loss.item() for name, loss in losses.items()}
        values["total_loss"] = sum(values.values())
        return values

    def update(self, total_loss: float) -> None:
        if not math.isfinite(total_loss):
            raise FloatingPointError(f"the loss is {total_loss} in iteration {self.iteration}")
        self.optimizer.step()

    def store(self, values: Mapping[str, float]) -> None:
        self.record.store(self.iteration, values)
        if (self.iteration + 1) % job.LOG_PERIOD == 0:
            self.record.write(self.iteration)


class Record:
    """The numbers of a run: kept with their iterations, and written as a console and a JSON line."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.histories: dict[str, deque[tuple[int, float]]] = {}
        self.json_file = open(folder / "metrics.json", "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def __del__(self) -> None:
        self.json_file.close()

    def store(self, iteration: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name not in self.histories:
                self.histories[name] = deque(maxlen=_HISTORY_LENGTH)
            self.histories[name].append((iteration, value))

    def smooth(self) -> dict[str, float]:
        """The medians of the last values; of the learning rate, the last one."""
        smoothed = {}
        for name, history in self.histories.items():
            if name == "lr":
                smoothed[name] = history[-1][1]
            else:
                smoothed[name] = median(history)
        return smoothed

    def write(self, iteration: int) -> None:
        smoothed = self.smooth()
        self.write_console(iteration, smoothed)
        self.write_json(iteration, smoothed)

    def write_console(self, iteration: int, smoothed: Mapping[str, float]) -> None:
        eta_sec = smoothed["time"] * (job.MAX_ITER - iteration - 1)
        fields = [f"eta: {datetime.timedelta(seconds=int(eta_sec))}", f"iter: {iteration + 1}"]
        for name, value in smoothed.items():
            fields.append(f"{name}: {value:.4g}")
        logger.info("  ".join(fields))

    def write_json(self, iteration: int, smoothed: Mapping[str, float]) -> None:
        eta_sec = smoothed["time"] * (job.MAX_ITER - iteration - 1)
        line = {**smoothed, "eta_seconds": eta_sec, "iteration": iteration}
        self.json_file.write(json.dumps(line, sort_keys=True) + "\n")


def median(history: deque[tuple[int, float]]) -> float:
    """The median of the last 20 values."""
    values = sorted(value for _, value in itertools.islice(reversed(history), _WINDOW))
    middle = len(values) // 2
    if len(values) % 2 == 1:
        return values[middle]
    return (values[middle - 1] + values[middle]) / 2


# ---------------------------------------------------------------------------- variants


class HalfPrecisionLoop(HandWrittenLoop):
    """With the forward pass in bfloat16."""

    def forward(self, batch: Any) -> tuple[dict[str, Tensor], Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(batch)


class AccumulatingLoop(HandWrittenLoop):
    """With the gradients of four batches in each step."""

    micro_batches = 4

    def compute_gradients(self) -> tuple[dict[str, Tensor], float]:
        self.optimizer.zero_grad()
        data_time = 0.0
        means: dict[str, Tensor] = {}
        for _ in range(self.micro_batches):
            start = time.perf_counter()
            batch = next(self.batches)
            data_time += time.perf_counter() - start
            losses = self.model(batch)
            total = losses["loss_mse"] + losses["loss_l1"]
            (total / self.micro_batches).backward()
            for name, loss in losses.items():
                part = loss.detach() / self.micro_batches
                means[name] = means[name] + part if name in means else part
        return means, data_time


class SkippingLoop(HandWrittenLoop):
    """An update whose loss or gradients are not finite is left out and counted."""

    skipped_updates = 0

    def update(self, total_loss: float) -> None:
        gradients = [parameter.grad for parameter in self.model.parameters()]
        if math.isfinite(total_loss) and are_finite(gradients):
            self.optimizer.step()
        else:
            self.skipped_updates += 1

    def store(self, values: Mapping[str, float]) -> None:
        super().store({**values, "skipped_updates": self.skipped_updates})


def are_finite(tensors: list[Any]) -> bool:
    """Whether all numbers are finite, by the kernel of torch's GradScaler: one call for a list."""
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, torch.ones(()))
    return found.item() == 0
