"""A shorter timeout of the process group after the first step, which may take long."""

from datetime import timedelta

import torch.distributed as dist

from trainkit.engine.hook_base import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY


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
        self._is_set = True
