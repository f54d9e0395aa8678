"""What a step spends its time on."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import profiler

from trainkit.engine.train_loop import HookBase
from trainkit.utils import comm

logger = logging.getLogger(__name__)


class TorchProfiler(HookBase):
    """Profile the iterations that ``enable_predicate(trainer)`` picks, each into a trace of its own.

    Shapes, memory, stacks and FLOPs are recorded, which slows these steps down. The traces lie in ``output_dir``, for
    TensorBoard's profiler plugin if ``save_tensorboard``, else as ``trace_iter<N>.json`` for ``chrome://tracing``.

    Args:
        activities: default is all that the machine has, see ``torch.profiler.profile``.
    """

    def __init__(
        self,
        enable_predicate: Callable[[Any], bool],
        output_dir: str | Path,
        *,
        activities: Sequence[profiler.ProfilerActivity] | None = None,
        save_tensorboard: bool = True,
    ) -> None:
        self._enable_predicate = enable_predicate
        self._output_dir = Path(output_dir)
        self._activities = activities
        self._save_tensorboard = save_tensorboard
        self._profile: profiler.profile | None = None

    def before_step(self) -> None:
        if not self._enable_predicate(self.trainer):
            return
        self._output_dir.mkdir(parents=True, exist_ok=True)
        name = f"trace_iter{self.trainer.iter:07d}" + (f"_rank{comm.get_rank()}" if comm.get_rank() else "")
        if self._save_tensorboard:
            save = profiler.tensorboard_trace_handler(str(self._output_dir), worker_name=name)
        else:

            def save(profile: profiler.profile) -> None:
                profile.export_chrome_trace(str(self._output_dir / f"{name}.json"))

        self._profile = profiler.profile(
            activities=self._activities,
            on_trace_ready=save,
            record_shapes=True,
            profile_memory=True,
            with_stack=True,
            with_flops=True,
        )
        self._profile.__enter__()

    def after_step(self) -> None:
        self._stop()

    def after_train(self) -> None:
        self._stop()  # a step that failed

    def _stop(self) -> None:
        if self._profile is not None:
            profile, self._profile = self._profile, None
            profile.__exit__(None, None, None)
            logger.info("Profile of iteration %d saved in %s", self.trainer.iter, self._output_dir)
