"""Hooks that look at the losses and gradients of a step, before its update."""

import logging
import math

import torch

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils import comm
from trainkit.utils.device import unwrap_model
from trainkit.utils.errors import ConfigError
from trainkit.utils.periods import check_period, is_due

logger = logging.getLogger(__name__)


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


@HOOK_REGISTRY.register()
class GradNorm(HookBase):
    """Store ``grad_norm``, the 2-norm of all gradients before the update, every ``period`` iterations.

    Clipping (SOLVER.CLIP_GRADIENTS) stores it in each iteration, so this hook is then an error.
    """

    config_keys = (("period", "LOG.PERIOD"),)

    def __init__(self, period: int = 20) -> None:
        self._period = check_period("period", period, minimum=1)

    def before_train(self) -> None:
        if getattr(self.trainer, "clip_gradients", None) is not None:
            raise ConfigError("SOLVER.CLIP_GRADIENTS stores grad_norm already; leave GradNorm out")

    def after_backward(self) -> None:
        if is_due(self.trainer, self._period, or_last=True):
            grads = [parameter.grad for parameter in self.trainer.model.parameters() if parameter.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of a sharded model
            self.trainer.storage.put_scalar("grad_norm", norm)


@HOOK_REGISTRY.register()
class UnusedParameters(HookBase):
    """Name the trainable parameters without a gradient: the loss does not depend on them.

    DistributedDataParallel would fail because of them in the next forward pass. The first iteration of a run and every
    ``period``-th are checked, on each rank; the same names are logged only once, or with ``raise_error`` end the run
    before the update. The optimizer must set gradients to None, as it does by default.
    """

    def __init__(self, period: int = 1, raise_error: bool = False) -> None:
        self._period, self._raise_error = check_period("period", period), raise_error

    def before_train(self) -> None:
        self._last_found = ""

    def after_backward(self) -> None:
        if self.trainer.iter == self.trainer.start_iter or is_due(self.trainer, self._period):
            named = unwrap_model(self.trainer.model).named_parameters()
            found = ", ".join(name for name, param in named if param.requires_grad and param.grad is None)
            if found and self._raise_error:
                raise RuntimeError(f"parameters without a gradient in iteration {self.trainer.iter}: {found}")
            if found and found != self._last_found:
                text = "Parameters without a gradient in iteration %d: %s; remove or freeze them"
                logger.error(text, self.trainer.iter, found)
            self._last_found = found
