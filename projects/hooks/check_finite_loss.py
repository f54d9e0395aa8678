"""Stop before a loss that is not finite reaches the weights."""

import math

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils import comm
from trainkit.utils.periods import check_period, is_due


@HOOK_REGISTRY.register()
class CheckFiniteLoss(HookBase):
    """Every ``interval``-th iteration, before the update, raise FloatingPointError if a loss of any rank is not finite.

    The trainers check every iteration themselves, but with asynchronous metrics their error comes up to one log period
    later. This hook waits for the device and the other ranks. It ignores entries that are only logged.
    """

    def __init__(self, interval: int = 50) -> None:
        self._interval = check_period("interval", interval, minimum=1)

    def after_backward(self) -> None:
        if is_due(self.trainer, self._interval):
            losses = self.trainer.losses
            names = getattr(self.trainer, "trained_losses", losses)  # a user's run_step may set only ``losses``
            by_rank = comm.all_gather({name: losses[name].item() for name in names})
            if not all(math.isfinite(value) for found in by_rank for value in found.values()):
                raise FloatingPointError(f"in iteration {self.trainer.iter}, before the update, by rank: {by_rank}")
