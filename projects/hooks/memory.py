"""Hooks that log or free memory."""

import gc
import logging
from typing import Any

import torch

from trainkit.engine.hook_base import HOOK_REGISTRY, SAVE_POINT, HookBase
from trainkit.utils.device import accelerator_runs_ahead
from trainkit.utils.periods import check_period, is_due

logger = logging.getLogger(__name__)

_MIB = 2**20


@HOOK_REGISTRY.register()
class TorchMemoryStats(HookBase):
    """Log the device's memory every ``period`` iterations, ``max_runs`` times; on CUDA also torch's summary, once.

    The peak is not reset, so other readers of it, such as the console writer, see the same numbers. Does nothing on a
    CPU.
    """

    def __init__(self, period: int = 20, max_runs: int = 10) -> None:
        self._period = check_period("period", period, minimum=1)
        self._max_runs = check_period("max_runs", max_runs)

    def before_train(self) -> None:
        self._runs = 0

    def after_step(self) -> None:
        wants = self._runs < self._max_runs and is_due(self.trainer, self._period, or_last=True)
        if not wants or not accelerator_runs_ahead():
            return
        memory = torch.accelerator.memory
        self._runs += 1
        logger.info(
            "Device memory after iteration %d: %.0f MiB allocated, peak %.0f; %.0f MiB reserved, peak %.0f",
            self.trainer.iter,
            memory.memory_allocated() / _MIB,
            memory.max_memory_allocated() / _MIB,
            memory.memory_reserved() / _MIB,
            memory.max_memory_reserved() / _MIB,
        )
        if self._runs == self._max_runs and torch.cuda.is_available():
            logger.info("\n%s", torch.cuda.memory_summary())


@HOOK_REGISTRY.register()
class EmptyCache(HookBase):
    """Return the accelerator memory that torch has cached but does not use; nothing happens without an accelerator.

    It waits for the device, and the next allocations are slow. Use it if training and evaluation do not fit into memory
    together. An evaluation counts as an epoch, each of its batches as a step.
    """

    priority = SAVE_POINT + 4  # after the hooks that use memory

    def __init__(self, before_epoch: bool = False, after_step: bool = False, after_epoch: bool = True) -> None:
        chosen = {
            ("before_epoch", "before_eval"): before_epoch,
            ("after_step", "after_eval_step"): after_step,
            ("after_epoch", "after_eval"): after_epoch,
        }
        for points, is_on in chosen.items():
            for point in points if is_on else ():
                # set on the object, not in the class: the epoch points need a trainer with epochs
                setattr(self, point, _empty_cache)


def _empty_cache(*_: Any) -> None:
    if torch.accelerator.is_available():
        torch.get_device_module().empty_cache()


@HOOK_REGISTRY.register()
class GarbageCollection(HookBase):
    """Collect cyclic garbage only every ``period`` iterations, on all ranks in the same step.

    Python's automatic collection is off during training: otherwise each rank would pause at a different time, and all
    others would wait for it.

    Args:
        generation: 0 to 2, see ``gc.collect``; 2 looks at every object and takes seconds in a large program.
    """

    priority = SAVE_POINT + 4  # after the hooks that use memory

    def __init__(self, period: int = 1000, generation: int = 1) -> None:
        if generation not in (0, 1, 2):
            raise ValueError(f"generation must be 0, 1 or 2, got {generation!r}")
        self._period = check_period("period", period, minimum=1)
        self._generation = generation
        self._was_enabled = False

    def before_train(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()  # the garbage from building the job

    def after_step(self) -> None:
        if is_due(self.trainer, self._period):
            gc.collect(self._generation)

    def after_train(self) -> None:
        if self._was_enabled:
            gc.enable()
            self._was_enabled = False  # after_train may be called again without a before_train
