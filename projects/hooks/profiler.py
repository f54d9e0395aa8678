"""Hooks that profile steps, and hooks that log or free memory."""

import gc
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import profiler

from trainkit.engine.hook_base import HOOK_REGISTRY, SAVE_POINT, HookBase
from trainkit.utils import comm
from trainkit.utils.device import accelerator_runs_ahead
from trainkit.utils.periods import check_period, is_due, is_whole, say_done

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class TorchProfiler(HookBase):
    """Profile shapes, memory, stacks and FLOPs of some iterations, each into its own trace; it slows these steps down.

    ``enable_predicate`` is a function of the trainer, or ``[begin, end]``, where ``end`` is not included. The files are
    in ``output_dir``, by default ``profile`` in the config's OUTPUT_DIR: for TensorBoard's profiler plugin, or without
    ``save_tensorboard`` ``trace_iter<N>.json`` for a browser. The default of ``activities`` is all of the machine.
    """

    def __init__(
        self,
        enable_predicate: Callable[[Any], bool] | Sequence[int],
        output_dir: str | Path | None = None,
        *,
        activities: Sequence[profiler.ProfilerActivity] | None = None,
        save_tensorboard: bool = True,
    ) -> None:
        if not callable(enable_predicate):
            _check_range(enable_predicate)
        self._picks = enable_predicate
        self._output_dir = output_dir
        self._activities = activities
        self._save_tensorboard = save_tensorboard
        self._profile: profiler.profile | None = None

    def before_train(self) -> None:
        if not callable(self._picks) and self._picks[0] >= self.trainer.max_iter:
            text = (
                "%s: enable_predicate is %s, but the run has only %d iterations: none is profiled"
            )
            logger.warning(text, type(self).__name__, [*self._picks], self.trainer.max_iter)
        self._folder = Path(self._output_dir or Path(self.trainer.cfg.OUTPUT_DIR, "profile"))

    def before_step(self) -> None:
        if self._is_picked():
            self._profile = profiler.profile(
                activities=self._activities,
                on_trace_ready=self._save,
                record_shapes=True,
                profile_memory=True,
                with_stack=True,
                with_flops=True,
            )
            self._profile.start()

    def _is_picked(self) -> bool:
        if callable(self._picks):
            return self._picks(self.trainer)
        begin, end = self._picks
        return begin <= self.trainer.iter < end

    def _save(self, profile: profiler.profile) -> None:
        name = f"trace_iter{self.trainer.iter:07d}"
        if comm.get_rank() != 0:
            name += f"_rank{comm.get_rank()}"
        if self._save_tensorboard:
            profiler.tensorboard_trace_handler(str(self._folder), worker_name=name)(profile)
        else:
            self._folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(self._folder / f"{name}.json"))
        logger.info(
            "Profile of iteration %d (counted from 0) saved in %s", self.trainer.iter, self._folder
        )

    def after_step(self) -> None:
        if self._profile is not None:
            profile = self._profile
            self._profile = None
            profile.stop()

    def after_train(self) -> None:
        self.after_step()  # writes the profile of a step that failed


def _check_range(picks: Any) -> None:
    is_pair = isinstance(picks, Sequence) and len(picks) == 2
    if not is_pair or not all(is_whole(iteration, 0) for iteration in picks):
        accepted = "a function of the trainer, or [begin, end] in iterations"
        raise ValueError(f"enable_predicate must be {accepted}, got {picks!r}")
    begin, end = picks
    if begin >= end:
        raise ValueError(f"enable_predicate must be [begin, end] with begin < end, got {picks!r}")


@HOOK_REGISTRY.register()
class AutogradProfiler(TorchProfiler):
    """`TorchProfiler` with the arguments of detectron2's older hook: traces for ``chrome://tracing``."""

    def __init__(
        self,
        enable_predicate: Callable[[Any], bool] | Sequence[int],
        output_dir: str | Path | None = None,
        *,
        use_cuda: bool = True,
    ) -> None:
        activities = None if use_cuda else [profiler.ProfilerActivity.CPU]
        super().__init__(
            enable_predicate, output_dir, activities=activities, save_tensorboard=False
        )


@HOOK_REGISTRY.register()
class TorchMemoryStats(HookBase):
    """Log the device's memory every ``period`` iterations, ``max_runs`` times; on CUDA also torch's summary, once.

    The peak is not reset, so other readers of it see the same numbers. Does nothing on a CPU.
    """

    def __init__(self, period: int = 20, max_runs: int = 10) -> None:
        self._period = check_period("period", period, minimum=1)
        self._max_runs = check_period("max_runs", max_runs)

    def before_train(self) -> None:
        self._runs = 0

    def after_step(self) -> None:
        is_wanted = self._runs < self._max_runs and is_due(self.trainer, self._period, or_last=True)
        if is_wanted and accelerator_runs_ahead():
            self._runs += 1
            memory = torch.accelerator.memory
            logger.info(
                "Device memory %s: %.0f MiB allocated, peak %.0f; %.0f MiB reserved, peak %.0f",
                say_done(self.trainer.done),
                memory.memory_allocated() / 2**20,
                memory.max_memory_allocated() / 2**20,
                memory.memory_reserved() / 2**20,
                memory.max_memory_reserved() / 2**20,
            )
            if self._runs == self._max_runs and torch.cuda.is_available():
                logger.info("\n%s", torch.cuda.memory_summary())


@HOOK_REGISTRY.register()
class MemorySnapshot(HookBase):
    """If CUDA runs out of memory, write torch's history of allocations to a file.

    View the file, ``memory_<iteration>_rank<rank>.pickle``, at https://docs.pytorch.org/memory_viz. It is in
    ``output_dir`` or the folder of the checkpoints. The newest ``max_entries`` allocations are kept; recording one
    takes a few microseconds.
    """

    def __init__(self, output_dir: str = "", max_entries: int = 100_000) -> None:
        self._output_dir = output_dir
        self._max_entries = check_period("max_entries", max_entries, minimum=1)

    def before_train(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(max_entries=self._max_entries)

    def after_failure(self, error: BaseException) -> None:
        if torch.cuda.is_available() and isinstance(error, torch.OutOfMemoryError):
            checkpointer = getattr(self.trainer, "checkpointer", None)
            folder = Path(self._output_dir or getattr(checkpointer, "save_dir", ""))
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"memory_{self.trainer.iter}_rank{comm.get_rank()}.pickle"
            torch.cuda.memory._dump_snapshot(str(file))
            logger.error(
                "The history of the memory is in %s, for https://docs.pytorch.org/memory_viz", file
            )

    def after_train(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(enabled=None)


@HOOK_REGISTRY.register()
class EmptyCache(HookBase):
    """Return the accelerator memory that torch has cached but does not use; nothing happens without an accelerator.

    It waits for the device, and the next allocations are slow. An evaluation counts as an epoch, each of its batches as
    a step.
    """

    priority = SAVE_POINT + 4  # after the hooks that use memory

    def __init__(
        self, before_epoch: bool = False, after_step: bool = False, after_epoch: bool = True
    ) -> None:
        points: list[str] = []
        if before_epoch:
            points += ["before_epoch", "before_eval"]
        if after_step:
            points += ["after_step", "after_eval_step"]
        if after_epoch:
            points += ["after_epoch", "after_eval"]
        for point in points:
            # not in the class: the epoch points need a trainer with epochs
            setattr(self, point, _empty_cache)


def _empty_cache(*_: Any) -> None:
    if torch.accelerator.is_available():
        torch.get_device_module().empty_cache()


@HOOK_REGISTRY.register()
class GarbageCollection(HookBase):
    """Collect cyclic garbage only every ``period`` iterations, on all ranks in the same step.

    With Python's automatic collection each rank would pause at a different time, and all others would wait for it.
    See ``gc.collect`` for ``generation``; 2 looks at every object and takes seconds in a large program.
    """

    priority = SAVE_POINT + 4  # after the hooks that use memory
    _was_enabled = False

    def __init__(self, period: int = 1000, generation: int = 1) -> None:
        self._period = check_period("period", period, minimum=1)
        if not is_whole(generation, 0) or generation > 2:
            raise ValueError(f"generation must be 0, 1 or 2, got {generation!r}")
        self._generation = generation

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
