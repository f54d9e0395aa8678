"""Find parameters that get no gradient."""

import logging

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils.device import unwrap_model
from trainkit.utils.periods import check_period, is_due

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class UnusedParameters(HookBase):
    """Name the trainable parameters without a gradient: the loss does not depend on them.

    DistributedDataParallel would fail because of them in the next forward pass. The same names are logged only once.
    Each rank checks its own gradients. The optimizer must set gradients to None, as it does by default.

    Args:
        period: check the first iteration of a run and every ``period``-th; 0: only the first.
        raise_error: raise RuntimeError before the update, instead of logging an error.
    """

    def __init__(self, period: int = 1, raise_error: bool = False) -> None:
        self._period, self._raise_error = check_period("period", period), raise_error
        self._last_found: list[str] = []

    def before_train(self) -> None:
        self._last_found = []

    def after_backward(self) -> None:
        if self.trainer.iter == self.trainer.start_iter or is_due(self.trainer, self._period):
            named = unwrap_model(self.trainer.model).named_parameters()
            found = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
            if found and self._raise_error:
                raise RuntimeError(
                    f"parameters without a gradient in iteration {self.trainer.iter}: {', '.join(found)}"
                )
            if found and found != self._last_found:
                text = "Parameters without a gradient in iteration %d: %s; remove or freeze them"
                logger.error(text, self.trainer.iter, ", ".join(found))
            self._last_found = found
