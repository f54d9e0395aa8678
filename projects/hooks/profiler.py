"""Hooks that profile steps."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import profiler

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils import comm

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class TorchProfiler(HookBase):
    """Profile shapes, memory, stacks and FLOPs of some iterations, each into its own trace; it slows these steps down.

    Args:
        enable_predicate: a function of the trainer, or ``[begin, end]``, where ``end`` is not included.
        output_dir: default is the folder ``profile`` in the config's OUTPUT_DIR.
        activities: default is all that the machine has.
        save_tensorboard: True: for TensorBoard's profiler plugin; False: ``trace_iter<N>.json`` for a browser.
    """

    def __init__(
        self,
        enable_predicate: Callable[[Any], bool] | Sequence[int],
        output_dir: str | Path | None = None,
        *,
        activities: Sequence[profiler.ProfilerActivity] | None = None,
        save_tensorboard: bool = True,
    ) -> None:
        self._picks, self._output_dir = enable_predicate, output_dir
        self._activities, self._save_tensorboard = activities, save_tensorboard
        self._profile: profiler.profile | None = None

    def before_train(self) -> None:
        self._folder = Path(self._output_dir or Path(self.trainer.cfg.OUTPUT_DIR, "profile"))

    def before_step(self) -> None:
        picks, iter = self._picks, self.trainer.iter
        if picks(self.trainer) if callable(picks) else picks[0] <= iter < picks[1]:
            options: Any = dict.fromkeys(("record_shapes", "profile_memory", "with_stack", "with_flops"), True)
            self._profile = profiler.profile(activities=self._activities, on_trace_ready=self._save, **options)
            self._profile.start()

    def _save(self, profile: profiler.profile) -> None:
        name = f"trace_iter{self.trainer.iter:07d}" + (f"_rank{comm.get_rank()}" if comm.get_rank() else "")
        if self._save_tensorboard:
            profiler.tensorboard_trace_handler(str(self._folder), worker_name=name)(profile)
        else:
            self._folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(self._folder / f"{name}.json"))
        logger.info("Profile of iteration %d saved in %s", self.trainer.iter, self._folder)

    def after_step(self) -> None:
        if self._profile is not None:
            profile, self._profile = self._profile, None
            profile.stop()

    def after_train(self) -> None:
        self.after_step()  # writes the profile of a step that failed


class AutogradProfiler(TorchProfiler):
    """`TorchProfiler` with the arguments of detectron2's older hook: traces for ``chrome://tracing``."""

    def __init__(
        self,
        enable_predicate: Callable[[Any], bool] | Sequence[int],
        output_dir: str | Path | None = None,
        *,
        use_cuda: bool = True,
    ) -> None:
        cpu = [profiler.ProfilerActivity.CPU]
        super().__init__(enable_predicate, output_dir, activities=None if use_cuda else cpu, save_tensorboard=False)
