"""The shape of detectron2's engine, written anew from its design: loop, hooks, storage, writers.

As there, each hook has all methods, each value goes through ``put_scalar`` into a `HistoryBuffer`
of fvcore, and the losses are averaged over a list of ranks, which here has one entry.
"""

import datetime
import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fvcore.common.history_buffer import HistoryBuffer
from fvcore.common.timer import Timer
from torch import Tensor, nn

from benchmarks import job

logger = logging.getLogger("trainkit.benchmark")  # with the handlers of trainkit's log


class Hook:
    trainer: "Trainer"

    def before_train(self) -> None: ...

    def after_train(self) -> None: ...

    def before_step(self) -> None: ...

    def after_backward(self) -> None: ...

    def after_step(self) -> None: ...


class Storage:
    def __init__(self) -> None:
        self.iter = 0
        self.histories: dict[str, HistoryBuffer] = defaultdict(HistoryBuffer)
        self.latest: dict[str, tuple[float, int]] = {}
        self.smoothing_hints: dict[str, bool] = {}

    def put_scalar(self, name: str, value: float, smoothing_hint: bool = True) -> None:
        value = float(value)
        self.histories[name].update(value, self.iter)
        self.latest[name] = (value, self.iter)
        existing = self.smoothing_hints.get(name)
        if existing is None:
            self.smoothing_hints[name] = smoothing_hint
        elif existing != smoothing_hint:
            raise ValueError(f"{name} was put with another smoothing_hint")

    def put_scalars(self, **values: float) -> None:
        for name, value in values.items():
            self.put_scalar(name, value)

    def latest_with_smoothing_hint(self, window: int = 20) -> dict[str, tuple[float, int]]:
        result = {}
        for name, (value, iteration) in self.latest.items():
            if self.smoothing_hints[name]:
                value = self.histories[name].median(min(window, self.count_samples(name, window)))
            result[name] = (value, iteration)
        return result

    def count_samples(self, name: str, window: int) -> int:
        """How many of the last values are from the last ``window`` iterations."""
        values = self.histories[name].values()
        _, newest = values[-1]
        count = 0
        for _, iteration in reversed(values):
            if newest - iteration >= window:
                break
            count += 1
        return count


class Trainer:
    """The loop, and a step like that of detectron2's SimpleTrainer."""

    def __init__(
        self, model: nn.Module, batches: Iterable[Any], optimizer: torch.optim.Optimizer
    ) -> None:
        self.model = model
        self.model.train()
        self.batches: Iterator[Any] = iter(batches)
        self.optimizer = optimizer
        self.hooks: list[Hook] = []
        self.storage = Storage()
        self.iter = 0

    def register_hooks(self, hooks: Iterable[Hook]) -> None:
        for hook in hooks:
            hook.trainer = self
            self.hooks.append(hook)

    def train(self, start_iter: int, max_iter: int) -> None:
        self.max_iter = max_iter
        for hook in self.hooks:
            hook.before_train()
        for self.iter in range(start_iter, max_iter):
            self.before_step()
            self.run_step()
            self.after_step()
        self.iter += 1
        for hook in self.hooks:
            hook.after_train()

    def before_step(self) -> None:
        self.storage.iter = self.iter
        for hook in self.hooks:
            hook.before_step()

    def after_backward(self) -> None:
        for hook in self.hooks:
            hook.after_backward()

    def after_step(self) -> None:
        for hook in self.hooks:
            hook.after_step()

    def run_step(self) -> None:
        start = time.perf_counter()
        batch = next(self.batches)
        data_time = time.perf_counter() - start
        losses = self.model(batch)
        total = sum(losses.values())
        self.optimizer.zero_grad()
        total.backward()
        self.after_backward()
        self.write_metrics(losses, data_time)
        self.optimizer.step()

    def write_metrics(self, losses: Mapping[str, Tensor], data_time: float) -> None:
        values = {name: loss.detach().cpu().item() for name, loss in losses.items()}
        values["data_time"] = data_time
        of_ranks = [values]
        self.storage.put_scalar("rank_data_time", data_time)
        slowest = np.max([each.pop("data_time") for each in of_ranks])
        self.storage.put_scalar("data_time", slowest)
        means: dict[str, Any] = {}
        for name in of_ranks[0]:
            means[name] = np.mean([each[name] for each in of_ranks])
        total: Any = sum(means.values())
        if not np.isfinite(total):
            raise FloatingPointError(f"the loss is not finite in iteration {self.iter}: {means}")
        self.storage.put_scalar("total_loss", total)
        self.storage.put_scalars(**means)


class IterationTimer(Hook):
    def __init__(self) -> None:
        self.step_timer = Timer()
        self.total_timer = Timer()

    def before_train(self) -> None:
        self.total_timer.reset()
        self.total_timer.pause()

    def before_step(self) -> None:
        self.step_timer.reset()
        self.total_timer.resume()

    def after_step(self) -> None:
        self.trainer.storage.put_scalars(time=self.step_timer.seconds())
        self.total_timer.pause()


class Schedule(Hook):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, job.schedule)

    def after_step(self) -> None:
        lr = self.optimizer.param_groups[0]["lr"]
        self.trainer.storage.put_scalar("lr", lr, smoothing_hint=False)
        self.scheduler.step()


class Writers(Hook):
    """A console line and a JSON line every 20 steps; each writer asks for the medians itself."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.json_file = open(folder / "metrics.json", "a", encoding="utf-8")  # noqa: SIM115

    def __del__(self) -> None:
        self.json_file.close()

    def after_step(self) -> None:
        if (self.trainer.iter + 1) % job.LOG_PERIOD == 0:
            self.write_console()
            self.write_json()

    def write_console(self) -> None:
        storage = self.trainer.storage
        step_sec = storage.histories["time"].global_avg()
        eta_sec = step_sec * (job.MAX_ITER - storage.iter - 1)
        storage.put_scalar("eta_seconds", eta_sec, smoothing_hint=False)
        eta = datetime.timedelta(seconds=int(eta_sec))
        fields = [f"eta: {eta}", f"iter: {storage.iter}"]
        for name, (value, _) in storage.latest_with_smoothing_hint().items():
            if "loss" in name:
                fields.append(f"{name}: {value:.4g}")
        for name in ("time", "data_time"):
            fields.append(f"{name}: {storage.histories[name].avg(20):.4f}")
            fields.append(f"last_{name}: {storage.histories[name].latest():.4f}")
        lr, _ = storage.latest["lr"]
        fields.append(f"lr: {lr:.5g}")
        logger.info("  ".join(fields))

    def write_json(self) -> None:
        storage = self.trainer.storage
        lines: dict[int, dict[str, float]] = defaultdict(dict)
        for name, (value, iteration) in storage.latest_with_smoothing_hint().items():
            lines[iteration][name] = value
        for iteration, values in lines.items():
            values["iteration"] = iteration
            self.json_file.write(json.dumps(values, sort_keys=True) + "\n")
        self.json_file.flush()


class Clock(Hook):
    """Times the steps after the first log period of a chunk."""

    def before_train(self) -> None:
        self.first = self.trainer.iter + job.LOG_PERIOD - 1
        self.start = math.nan

    def after_step(self) -> None:
        if self.trainer.iter == self.first:
            self.start = time.perf_counter()

    def after_train(self) -> None:
        self.total = time.perf_counter() - self.start


def make(folder: Path) -> Callable[[int], float]:
    model = job.make_model()
    optimizer = job.make_optimizer(model)
    trainer = Trainer(model, job.EndlessBatches(), optimizer)
    clock = Clock()
    trainer.register_hooks([IterationTimer(), Schedule(optimizer), Writers(folder), clock])

    def run(steps: int) -> float:
        trainer.train(trainer.iter, trainer.iter + job.LOG_PERIOD + steps)
        return clock.total / steps

    return run
