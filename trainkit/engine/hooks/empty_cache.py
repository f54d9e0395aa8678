"""Giving unused memory of the accelerator back."""

from typing import Any

import torch

from trainkit.engine.hook_base import SAVE_POINT, HookBase
from trainkit.engine.hooks.registry import HOOK_REGISTRY


@HOOK_REGISTRY.register()
class EmptyCache(HookBase):
    """Let torch give the accelerator's memory that it holds but does not use back; without one nothing happens.

    It waits for the device, and the next allocations are slow: for jobs whose training and evaluation do not fit
    side by side. An evaluation counts as an epoch, each of its batches as a step.
    """

    priority = SAVE_POINT + 1

    def __init__(self, before_epoch: bool = False, after_step: bool = False, after_epoch: bool = True) -> None:
        chosen = {
            ("before_epoch", "before_eval"): before_epoch,
            ("after_step", "after_eval_step"): after_step,
            ("after_epoch", "after_eval"): after_epoch,
        }
        for points, is_on in chosen.items():
            for point in points if is_on else ():
                # on the object, not in the class: the points of epochs need a trainer that has epochs
                setattr(self, point, _empty_cache)


def _empty_cache(*_: Any) -> None:
    if torch.accelerator.is_available():
        torch.get_device_module().empty_cache()
