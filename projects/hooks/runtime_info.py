"""Facts about a run, samples per second, and the utilization of the device."""

import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from trainkit.projects.evaluators.samples import SampleCounter
from trainkit.projects.solver_extras.rules import group_names

from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.engine.hooks.lr_scheduler import LRScheduler
from trainkit.engine.metrics import Row, exchange_rows
from trainkit.utils import comm
from trainkit.utils.device import unwrap_model
from trainkit.utils.events import get_event_storage
from trainkit.utils.periods import check_number, check_period, is_due

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class RuntimeInfo(HookBase):
    """Store ``epoch``, momentum and learning rates; at the start log the length and size of the run.

    If there are several parameter groups, ``lr/<name>`` is stored for each, under its name in the table at the start.
    The momentum is that of the first group; that of Adam is its first beta. Use the ``period`` of the writers.
    """

    priority = 42  # early: the values of all later hooks belong to the epoch that it stores
    config_keys = (("period", "LOG.PERIOD"),)

    def __init__(self, period: int = 1) -> None:
        self._period = check_period("period", period, minimum=1)

    def before_train(self) -> None:
        model = getattr(self.trainer, "model", None)
        groups = self._groups()
        self._names: list[str] = []
        if groups and isinstance(model, nn.Module):
            self._names = group_names(groups, unwrap_model(model))
        logger.info("This run: %s", "; ".join(self._describe(model)))

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = getattr(self.trainer, "optimizer", None)
        return getattr(optimizer, "param_groups", [])

    def before_step(self) -> None:
        # the schedule changes the rates after the step
        if is_due(self.trainer, self._period, or_last=True):
            rates = [group["lr"] for group in self._groups()]
            self._used = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def after_step(self) -> None:
        if not is_due(self.trainer, self._period, or_last=True):
            return
        found: dict[str, Any] = {}
        if self.trainer.has_epochs:
            found["epoch"] = self.trainer.epoch
        if len(self._used) > 1:
            for place, lr in enumerate(self._used):
                # a hook may add groups
                name = self._names[place] if place < len(self._names) else place
                found[f"lr/{name}"] = lr
        momentum = self._momentum()
        if momentum is not None:
            found["momentum"] = momentum
        for name, value in found.items():
            self.trainer.storage.put_scalar(name, value, smoothing_hint=False)

    def _momentum(self) -> Any:
        """That of the first group; None if there is none, or a hook stores it."""
        if any(getattr(hook, "param", "") == "momentum" for hook in self.trainer.hooks):
            return None
        groups = self._groups()
        if not groups:
            return None
        first = groups[0]
        if "momentum" in first:
            return first["momentum"]
        return first["betas"][0] if "betas" in first else None

    def _describe(self, model: Any) -> Iterator[str]:
        trainer = self.trainer
        cfg = getattr(trainer, "cfg", None)
        length = f"{trainer.max_iter} iterations"
        if trainer.has_epochs:
            per_epoch = trainer.epoch_length
            num_epochs = trainer.max_iter / per_epoch
            length += f" = {float(num_epochs):g} epochs of {float(per_epoch):g}"
        yield length
        yield f"world size {comm.get_world_size()}"
        if len(self._names) > 1:
            shown = LRScheduler.get_best_param_group_id(trainer.optimizer)
            yield f"lr is that of the parameter group {self._names[shown]!r}"
        if cfg is not None:
            samples = cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.ACCUMULATION_STEPS
            yield f"{samples} samples per iteration"
            yield f"seed {cfg.SEED}" if cfg.SEED >= 0 else "seed drawn at random"
        if isinstance(model, nn.Module):
            parameters = [*model.parameters()]
            total = sum(parameter.numel() for parameter in parameters)
            trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
            yield f"{trained:,} of {total:,} parameters trained"


# 10^12 dense operations per second in 16 bits, from the makers' data sheets; the first part of a device's name counts
PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H20": 148,
    "A100": 312,
    "A10G": 70,
    "A10": 125,
    "V100": 125,
    "T4": 65,
    "L40S": 362,
    "L4": 121,
    "RTX 4090": 165,
    "MI300X": 1307,
    "MI250X": 383,
}


def peak_tflops_of(device_name: str) -> float | None:
    """The entry of `PEAK_TFLOPS` for a device such as "NVIDIA H100 80GB HBM3"; None if it is not known."""
    words = device_name.replace("-", " ")
    for part, peak in PEAK_TFLOPS.items():
        if f" {part} " in f" {words} ":
            return peak
    return None


@HOOK_REGISTRY.register()
class Throughput(HookBase):
    """Store ``samples_per_sec``, over all ranks and the last ``period`` iterations.

    The time is the host time of the steps, with data loading, without the hooks between them. The hook does not wait
    for the device. It counts the samples of each micro-batch by a `SampleCounter`; of a trainer without a ``feed``,
    those of ``trainer.batch``.

    If the model has ``flops_per_sample`` (a number, or a method without arguments: operations of forward and backward
    pass), ``mfu_pct`` is stored too: these operations as a percentage of ``peak_tflops``, see Chowdhery et al., "PaLM",
    appendix B. If the model has ``tokens_per_sample`` (in the same form), ``tokens_per_sec`` is stored. ``peak_tflops``
    is that of one device in the precision of the job; None: in 16 bits, if the device is in `PEAK_TFLOPS`.
    """

    priority = 41  # early: the time of a step must not include other hooks

    def __init__(self, period: int = 20, peak_tflops: float | None = None) -> None:
        self._period = check_period("period", period, minimum=1)
        self._peak_tflops = peak_tflops
        if peak_tflops is not None:
            check_number("peak_tflops", peak_tflops, "(0, inf)")

    def before_train(self) -> None:
        self._samples = 0
        self._sec = 0.0
        model = unwrap_model(self.trainer.model)
        flops = _number(model, "flops_per_sample")
        self._tokens_per_sample = _number(model, "tokens_per_sample")
        peak = self._peak_tflops
        if peak is not None and flops is None:
            raise ConfigError(
                f"peak_tflops of Throughput is given, but {type(model).__name__} has no "
                "flops_per_sample"
            )
        if peak is None and any(parameter.is_cuda for parameter in model.parameters()):
            peak = peak_tflops_of(torch.cuda.get_device_name())
        self._mfu_pct_per_sample = None
        if flops and peak:
            self._mfu_pct_per_sample = 100 * flops / 1e12 / peak
        self._count = SampleCounter(model, getattr(self.trainer, "data_loader", None))
        if hasattr(self.trainer, "feed"):
            self.trainer.feed.watchers.append(self._see)

    def _see(self, batch: Any) -> None:
        self._samples += self._count(batch)

    def before_step(self) -> None:
        self._step_begin = time.perf_counter()

    def after_step(self) -> None:
        self._sec += time.perf_counter() - self._step_begin
        if not hasattr(self.trainer, "feed"):
            self._see(self.trainer.batch)
        if is_due(self.trainer, self._period, or_last=True):
            # after the metrics of this step, which use the same process group
            store = partial(self._store, self.trainer.iter, self._samples, self._sec)
            self.trainer.storage.publish(store)
            self._samples = 0
            self._sec = 0.0

    def after_train(self) -> None:
        if hasattr(self.trainer, "feed"):
            self.trainer.feed.watchers.remove(self._see)

    def _store(self, iter: int, samples: int, sec: float) -> None:
        row = Row(iter, sec, {"samples": float(samples)})
        [mean], _ = exchange_rows([row], 1)
        of_rank = mean.values["samples"] / mean.data_time
        # ranks that compute a batch together count its samples once
        samples_per_sec = of_rank * comm.get_world_size() / comm.get_data_group_size()
        storage = get_event_storage()
        storage.put_scalar("samples_per_sec", samples_per_sec)
        if self._tokens_per_sample is not None:
            storage.put_scalar("tokens_per_sec", samples_per_sec * self._tokens_per_sample)
        if self._mfu_pct_per_sample is not None:
            of_device = samples_per_sec / comm.get_world_size()
            storage.put_scalar("mfu_pct", of_device * self._mfu_pct_per_sample)


def _number(model: nn.Module, name: str) -> float | None:
    """The attribute if it is a number, its result if it is a method; None if the model does not have it."""
    value = getattr(model, name, None)
    if callable(value):
        value = value()
    return None if value is None else float(value)
