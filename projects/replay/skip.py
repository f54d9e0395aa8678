"""The hook that leaves out the batches of some iterations (DATALOADER.SKIP)."""

import logging
from collections.abc import Sequence
from typing import Any

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils.periods import is_whole

logger = logging.getLogger(__name__)

RANGES = "a list of [start, end], whole numbers from 0 on, which grow"


def are_ranges(pairs: Any) -> bool:
    if not isinstance(pairs, list | tuple):
        return False
    numbers: list[Any] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return False
        numbers += pair
    are_whole = all(is_whole(number, 0) for number in numbers)
    return are_whole and numbers == sorted({*numbers})


@HOOK_REGISTRY.register()
class SkipBatches(HookBase):
    """Draw the batches of some iterations and throw them away, so that later batches take their places.

    ``ranges``: ``[start, end]`` of each range in increasing order; ``end`` is not included.
    """

    # [start, end] of what was thrown away, so that a resumed run does not do it again
    _state_names = ("_left_out",)

    def __init__(self, ranges: Sequence[Sequence[int]]) -> None:
        if not are_ranges(ranges):
            raise ValueError(f"ranges must be {RANGES}, got {ranges!r}")
        self._ranges = ranges
        self._left_out: list[list[int]] = []

    def before_train(self) -> None:
        start_iter = self.trainer.start_iter
        # not those of an earlier run
        self._left_out = [pair for pair in self._left_out if pair[0] < start_iter]
        for start, end in self._ranges:
            if end <= start_iter and not self._has_left_out(start, end):
                logger.warning(
                    "DATALOADER.SKIP: nothing of [%d, %d] is left out, "
                    "since the run continues with iteration %d",
                    start,
                    end,
                    start_iter,
                )

    def _has_left_out(self, start: int, end: int) -> bool:
        """Whether a part of the range was left out."""
        return any(first < end and start < last for first, last in self._left_out)

    def before_step(self) -> None:
        iter = self.trainer.iter
        first = iter
        for left_out_start, left_out_end in self._left_out:
            if left_out_start <= iter:
                first = max(first, left_out_end)
        end = iter
        for range_start, range_end in self._ranges:
            if range_start <= iter < range_end:
                end = range_end
        if first < end:
            text = (
                "DATALOADER.SKIP: the batches of iterations %d to %d are left out, "
                "and iteration %d gets the next one"
            )
            logger.info(text, first, end - 1, iter)
            for _ in range((end - first) * self.trainer.accumulation_steps):
                self.trainer.fetch()
            self._left_out = [*self._left_out, [first, end]]
