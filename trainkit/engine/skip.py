"""Leave out the batches of some iterations (DATALOADER.SKIP)."""

import logging
from typing import Any

import torch

from trainkit.config import CfgNode
from trainkit.utils.losses import Losses

logger = logging.getLogger(__name__)


class Skip:
    """Draws the batches of the iterations in DATALOADER.SKIP and throws them away.

    Attributes:
        left_out: the iterations whose batches were thrown away so far, as ``[start, end]``; ``end`` is not included. It
            is part of the trainer's state, so that a resumed run leaves out no batch twice.
    """

    def __init__(self, cfg: CfgNode) -> None:
        self._ranges, self._consumes = cfg.DATALOADER.SKIP, cfg.DATALOADER.SKIP_MODE == "consume"
        self.left_out: list[list[int]] = []

    def begin(self, start_iter: int) -> None:
        """Call before a run. Forgets the ranges of an earlier run of this trainer; warns of ranges already passed."""
        self.left_out = [[start, end] for start, end in self.left_out if start <= start_iter]
        for start, end in self._ranges:
            if end <= start_iter and not any(first < end and start < last for first, last in self.left_out):
                text = "DATALOADER.SKIP: nothing of [%d, %d] is left out, since the run continues with iteration %d"
                logger.warning(text, start, end, start_iter)

    def leave_out(self, trainer: Any, iter: int) -> bool:
        """Call before the step of an iteration. True: make no step; hooks see the unused batch, and no losses."""
        if not self._ranges:
            return False
        end = next((end for start, end in self._ranges if start <= iter < end), iter)
        first = max([iter, *(last for start, last in self.left_out if start <= iter)])
        due = range(first, min(end, iter + 1) if self._consumes else end)
        goes_on = bool(self.left_out) and self.left_out[-1][1] == first
        *done, (start, _) = self.left_out if goes_on else [*self.left_out, [first, first]]
        if due and not goes_on:
            instead = "which make no step" if self._consumes else f"and iteration {iter} gets the next one"
            logger.info("DATALOADER.SKIP: the batches of iterations %d to %d are left out, %s", first, end - 1, instead)
        for number in due:
            trainer.fetch()
            self.left_out = [*done, [start, number + 1]]  # note it now: the run may stop while it waits for a batch
        if self._consumes and due:
            trainer._losses = Losses({}, [], torch.zeros(()))
        return self._consumes and bool(due)
