"""The hook of SimSiam (arXiv:2011.10566)."""

from typing import Any

from torch import Tensor

from trainkit.config import ConfigError
from trainkit.engine import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY


@HOOK_REGISTRY.register()
class SimSiamHook(HookBase):
    """Keep the predictor's learning rate at ``lr`` in every iteration; the schedule does not change it (section 4.2).

    The model needs no special attributes. The optimizer has parameter groups with ``fix_lr: True`` or
    ``fixed_lr: True``. In a config, an entry of ``SOLVER.PARAM_GROUPS.CUSTOM_KEYS`` makes them:
    ``{KEY: predictor, FIXED_LR: True}``.

    Args:
        fix_pred_lr: if False, the hook does nothing.

    Raises:
        ValueError: ``lr`` is negative.
        ConfigError: before training, if no group has the flag.
    """

    def __init__(self, fix_pred_lr: bool, lr: float) -> None:
        if not lr >= 0:
            raise ValueError(f"lr must be a number >= 0, got {lr!r}")
        self._fix_pred_lr, self._lr = fix_pred_lr, lr

    def before_train(self) -> None:
        groups = self.trainer.optimizer.param_groups
        if self._fix_pred_lr and not any(map(_is_flagged, groups)):
            raise ConfigError(
                "SimSiamHook needs a parameter group with fix_lr or fixed_lr, but the optimizer has none; add "
                "{KEY: predictor, FIXED_LR: True} to SOLVER.PARAM_GROUPS.CUSTOM_KEYS"
            )

    def before_step(self) -> None:
        if not self._fix_pred_lr:
            return
        for group in filter(_is_flagged, self.trainer.optimizer.param_groups):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self._lr)  # in place: a captured graph reads this tensor
            else:
                group["lr"] = self._lr


def _is_flagged(group: dict[str, Any]) -> bool:
    return bool(group.get("fix_lr") or group.get("fixed_lr"))
