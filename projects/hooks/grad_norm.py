"""The norm of the gradients, without clipping."""

import torch

from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils.periods import check_period, is_due


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
