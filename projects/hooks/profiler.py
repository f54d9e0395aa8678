"""Hooks that profile steps."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import profiler

from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils import comm

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class TorchProfiler(HookBase):
    """Profile the iterations for which ``enable_predicate`` is true, each into its own trace.

    Shapes, memory, stacks and FLOPs are recorded, which slows these steps down.

    Args:
        enable_predicate: a function of the trainer, or ``[begin, end]``, where ``end`` is not included.
        output_dir: default is the folder ``profile`` in the config's OUTPUT_DIR.
        activities: default is all that the machine has, see ``torch.profiler.profile``.
        save_tensorboard: True: for TensorBoard's profiler plugin; False: ``trace_iter<N>.json`` for
            ``chrome://tracing``.
    """

    def __init__(
        self,
        enable_predicate: Callable[[Any], bool] | Sequence[int],
        output_dir: str | Path | None = None,
        *,
        activities: Sequence[profiler.ProfilerActivity] | None = None,
        save_tensorboard: bool = True,
    ) -> None:
        self._enable_predicate = enable_predicate if callable(enable_predicate) else _within(enable_predicate)
        self._output_dir = None if output_dir is None else Path(output_dir)
        self._activities = activities
        self._save_tensorboard = save_tensorboard
        self._profile: profiler.profile | None = None

    def before_train(self) -> None:
        if self._output_dir is None:
            if not hasattr(self.trainer, "cfg"):
                raise ConfigError("this trainer has no config with an OUTPUT_DIR; give TorchProfiler an output_dir")
            self._output_dir = Path(self.trainer.cfg.OUTPUT_DIR, "profile")

    def before_step(self) -> None:
        if not self._enable_predicate(self.trainer):
            return
        folder = self._output_dir
        assert folder is not None  # before_train has set it
        folder.mkdir(parents=True, exist_ok=True)
        name = f"trace_iter{self.trainer.iter:07d}" + (f"_rank{comm.get_rank()}" if comm.get_rank() else "")
        save: Any = partial(profiler.profile.export_chrome_trace, path=f"{folder}/{name}.json")
        if self._save_tensorboard:
            save = profiler.tensorboard_trace_handler(str(folder), worker_name=name)
        self._profile = profiler.profile(
            activities=self._activities,
            on_trace_ready=save,
            record_shapes=True,
            profile_memory=True,
            with_stack=True,
            with_flops=True,
        )
        self._profile.start()

    def after_step(self) -> None:
        if self._profile is not None:
            profile, self._profile = self._profile, None
            profile.stop()
            logger.info("Profile of iteration %d saved in %s", self.trainer.iter, self._output_dir)

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
        activities = None if use_cuda else [profiler.ProfilerActivity.CPU]
        super().__init__(enable_predicate, output_dir, activities=activities, save_tensorboard=False)


def _within(limits: Any) -> Callable[[Any], bool]:
    is_pair = isinstance(limits, Sequence) and len(limits) == 2 and all(type(limit) is int for limit in limits)
    if not is_pair or not 0 <= limits[0] < limits[1]:
        raise ValueError(
            "enable_predicate must be a function of the trainer, or [begin, end] in iterations with 0 <= begin < end, "
            f"got {limits!r}"
        )
    begin, end = limits
    return lambda trainer: begin <= trainer.iter < end
