"""What a run is, in its log and among its numbers."""

import logging
from collections.abc import Iterator

from torch import nn

from trainkit.engine.hook_base import HookBase
from trainkit.engine.hooks.registry import HOOK_REGISTRY
from trainkit.engine.periods import check_period, is_due
from trainkit.utils import comm

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class RuntimeInfo(HookBase):
    """Store the ``epoch``, and log at the start how long, on what and with how many parameters is trained.

    Args:
        period: of storing, in iterations; that of the writers is enough.
    """

    def __init__(self, period: int = 1) -> None:
        self._period = check_period("period", period, minimum=1)

    def before_train(self) -> None:
        self._has_epochs = self.trainer.has_epochs
        logger.info("This run: %s", "; ".join(self._describe()))

    def after_step(self) -> None:
        if self._has_epochs and is_due(self.trainer, self._period, or_last=True):
            self.trainer.storage.put_scalar("epoch", self.trainer.epoch, smoothing_hint=False)

    def _describe(self) -> Iterator[str]:
        trainer = self.trainer
        length = f"{trainer.max_iter} iterations"
        if self._has_epochs:
            per_epoch = trainer.iters_per_epoch
            length += f" = {float(trainer.max_iter / per_epoch):g} epochs of {float(per_epoch):g}"
        yield length
        yield f"world size {comm.get_world_size()}"
        cfg = getattr(trainer, "cfg", None)
        if cfg is not None:
            yield f"{cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.ACCUMULATION_STEPS} samples per iteration"
            yield "seed " + (str(cfg.SEED) if cfg.SEED >= 0 else "drawn at random")
        model = getattr(trainer, "model", None)
        if isinstance(model, nn.Module):
            total = sum(parameter.numel() for parameter in model.parameters())
            trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
            yield f"{trained:,} of {total:,} parameters trained"
