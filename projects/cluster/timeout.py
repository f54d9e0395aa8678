"""A shorter timeout of the process group after the first step, which may take long."""

import logging
import os
from datetime import timedelta

import torch.distributed as dist

from trainkit.engine.hook_base import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class StepTimeout(HookBase):
    """From the second step on, a rank waits at most ``seconds`` for the others in an exchange of the process group."""

    def __init__(self, seconds: float) -> None:
        self._timeout = timedelta(seconds=seconds)

    def before_train(self) -> None:
        self._is_set = False

    def after_step(self) -> None:
        if not self._is_set and dist.is_initialized():
            dist.group.WORLD.set_timeout(self._timeout)  # type: ignore[union-attr]
            text = "Ranks wait %g s for each other from now on; after that, those on GPUs write their exchanges to %s*"
            logger.info(text, self._timeout.total_seconds(), trace_files())
        self._is_set = True


def trace_files() -> str:
    """Where torch's flight recorder, which is on for NCCL, writes when a rank waits too long; the rank follows."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    default = os.path.join(cache, "torch", "comm_lib_trace_rank_")
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", default)
