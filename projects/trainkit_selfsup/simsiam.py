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
    ``fixed_lr: True``; without one this is an error before training. In a config, an entry of
    ``SOLVER.PARAM_GROUPS.CUSTOM_KEYS`` makes them: ``{KEY: predictor, FIXED_LR: True}``. If ``fix_pred_lr`` is False,
    the hook does nothing.
    """

    def __init__(self, fix_pred_lr: bool, lr: float) -> None:
        self._fix_pred_lr, self._lr = fix_pred_lr, lr

    def _groups(self) -> list[dict[str, Any]]:
        groups = self.trainer.optimizer.param_groups if self._fix_pred_lr else []
        return [group for group in groups if group.get("fix_lr") or group.get("fixed_lr")]

    def before_train(self) -> None:
        if self._fix_pred_lr and not self._groups():
            entry = "{KEY: predictor, FIXED_LR: True} in SOLVER.PARAM_GROUPS.CUSTOM_KEYS"
            raise ConfigError(f"SimSiamHook needs a parameter group with fix_lr or fixed_lr, such as that of {entry}")

    def before_step(self) -> None:
        for group in self._groups():
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self._lr)  # in place: a captured graph reads this tensor
            else:
                group["lr"] = self._lr
