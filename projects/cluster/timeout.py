"""Shorter timeouts of the process group: one for the first step, which may take long, and one for all others."""

import logging
import os
from datetime import timedelta

import torch.distributed as dist

from trainkit.engine.hook_base import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class StepTimeout(HookBase):
    """Ranks wait at most ``first`` seconds for each other in the first step, then ``seconds``. 0: 30 minutes."""

    def __init__(self, seconds: float, first: float = 0.0) -> None:
        self._seconds, self._first = seconds or 1800.0, first or 1800.0

    def before_train(self) -> None:
        self._is_first = True
        text = "Ranks wait %g s for each other in the first step, then %g s; GPUs then write their exchanges to %s*"
        logger.info(text, self._first, self._seconds, trace_files())
        _set_timeout(self._first)

    def after_step(self) -> None:
        if self._is_first:
            _set_timeout(self._seconds)
        self._is_first = False


def _set_timeout(seconds: float) -> None:
    if dist.is_initialized():
        dist.group.WORLD.set_timeout(timedelta(seconds=seconds))  # type: ignore[union-attr]


def trace_files() -> str:
    """Where torch's flight recorder, which is on for NCCL, writes when a rank waits too long; the rank follows."""
    default = f"{os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')}/torch/comm_lib_trace_rank_"
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", default)
