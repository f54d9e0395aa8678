"""Stop before a loss that is not finite reaches the weights."""

import math

from trainkit.engine.hook_base import HookBase
from trainkit.engine.hooks.registry import HOOK_REGISTRY
from trainkit.engine.periods import check_period, is_due
from trainkit.utils import comm


@HOOK_REGISTRY.register()
class CheckFiniteLoss(HookBase):
    """Look at the losses of every ``interval``-th iteration, before its update, and raise if one is not finite.

    The trainers look themselves at each iteration (``non_finite`` of `SimpleTrainer`), but with asynchronous metrics
    up to one log period later. This hook is the early warning, and names the losses. It waits for the device and the
    other ranks in the iterations in which it looks. Entries that are only logged may be anything.

    Raises:
        FloatingPointError: in ``after_backward``, on every rank, if a loss of any rank is not finite.
    """

    def __init__(self, interval: int = 50) -> None:
        self._interval = check_period("interval", interval, minimum=1)

    def after_backward(self) -> None:
        if not is_due(self.trainer, self._interval):
            return
        losses = self.trainer.losses
        names = getattr(self.trainer, "trained_losses", losses)  # a run_step of one's own may only have losses
        by_rank = comm.all_gather({name: losses[name].item() for name in names})
        bad = [
            f"{name} is {value} on rank {rank}"
            for rank, found in enumerate(by_rank)
            for name, value in found.items()
            if not math.isfinite(value)
        ]
        if bad:
            raise FloatingPointError(
                f"in iteration {self.trainer.iter} {', '.join(bad)}; this rank has {by_rank[comm.get_rank()]}. Lower "
                "the learning rate, clip gradients, or look at the batch of this iteration; the weights have not been "
                "updated with it"
            )
