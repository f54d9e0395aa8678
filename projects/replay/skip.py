"""Leave out the batches of some iterations (DATALOADER.SKIP)."""

import logging
from collections.abc import Sequence
from typing import Any

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class SkipBatches(HookBase):
    """Draw the batches of some iterations and throw them away, so that later batches take their places.

    Args:
        ranges: ``[start, end]`` of each range in increasing order; ``end`` is not included.
    """

    _state_names = ("_left_out",)  # [start, end] of what was thrown away, so that a resumed run does not do it again

    def __init__(self, ranges: Sequence[Sequence[int]]) -> None:
        self._ranges = ranges
        self._left_out: list[list[int]] = []

    def before_train(self) -> None:
        start_iter = self.trainer.start_iter
        self._left_out = [pair for pair in self._left_out if pair[0] < start_iter]  # not those of an earlier run
        for start, end in self._ranges:
            if end <= start_iter and not any(first < end and start < last for first, last in self._left_out):
                text = "DATALOADER.SKIP: nothing of [%d, %d] is left out, since the run continues with iteration %d"
                logger.warning(text, start, end, start_iter)

    def before_step(self) -> None:
        iter = self.trainer.iter
        end = next((end for start, end in self._ranges if start <= iter < end), iter)
        first = max([iter, *(last for start, last in self._left_out if start <= iter)])
        if first < end:
            text = (
                "DATALOADER.SKIP: the batches of iterations %d to %d are left out, and iteration %d gets the next one"
            )
            logger.info(text, first, end - 1, iter)
            for _ in range((end - first) * self.trainer.accumulation_steps):
                self.trainer.fetch()
            self._left_out = [*self._left_out, [first, end]]

    def after_load(self, state: dict[str, Any]) -> None:
        trainer = state.get("trainer")  # of an older file: the list was not yet that of a hook
        if isinstance(trainer, dict) and "left_out" in trainer and isinstance(trainer.get("hooks"), dict):
            trainer["hooks"].setdefault("SkipBatches", {"left_out": trainer["left_out"]})
