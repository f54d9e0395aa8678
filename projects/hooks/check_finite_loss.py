"""Stop before a loss that is not finite reaches the weights."""

import math

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils import comm
from trainkit.utils.periods import check_period, is_due


@HOOK_REGISTRY.register()
class CheckFiniteLoss(HookBase):
    """Every ``interval``-th iteration, before the update, raise FloatingPointError if a loss of any rank is not finite.

    The trainers check every iteration themselves (``non_finite`` of `SimpleTrainer`), but with asynchronous metrics the
    error comes up to one log period later. This hook raises at once, on every rank, and names the losses. In each
    checked iteration it waits for the device and the other ranks. It ignores entries that are only logged.
    """

    def __init__(self, interval: int = 50) -> None:
        self._interval = check_period("interval", interval, minimum=1)

    def after_backward(self) -> None:
        if not is_due(self.trainer, self._interval):
            return
        losses = self.trainer.losses
        names = getattr(self.trainer, "trained_losses", losses)  # a user's run_step may set only ``losses``
        by_rank = comm.all_gather({name: losses[name].item() for name in names})
        bad = [
            f"{name} is {value} on rank {rank}"
            for rank, found in enumerate(by_rank)
            for name, value in found.items()
            if not math.isfinite(value)
        ]
        if bad:
            own = by_rank[comm.get_rank()]
            raise FloatingPointError(
                f"in iteration {self.trainer.iter}, before the update: {', '.join(bad)}; this rank has {own}"
            )
