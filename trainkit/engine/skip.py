"""Iterations whose batches are left out."""

import logging
from typing import Any

import torch

from trainkit.config import CfgNode
from trainkit.utils.losses import Losses

logger = logging.getLogger(__name__)


class Skip:
    """Leaves out the batches of the iterations in DATALOADER.SKIP; they are drawn and thrown away.

    By SKIP_MODE "shift" an iteration gets the batch after the range, "consume" makes no step in the iterations of the
    range. Each batch is left out once: what was left out is part of the state.

    Attributes:
        left_out: ``[start, end]`` of the iterations whose batches were left out, without ``end``.
    """

    def __init__(self, cfg: CfgNode) -> None:
        self._ranges, self._consumes = cfg.DATALOADER.SKIP, cfg.DATALOADER.SKIP_MODE == "consume"
        self.left_out: list[list[int]] = []

    def warn_of_passed(self, start_iter: int) -> None:
        """Name the ranges that the run has passed: their batches were trained on."""
        for start, end in self._ranges:
            if end <= start_iter and not any(first < end and start < last for first, last in self.left_out):
                text = "DATALOADER.SKIP: nothing of [%d, %d] is left out, since the run goes on with iteration %d"
                logger.warning(text, start, end, start_iter)

    def leave_out(self, trainer: Any, iter: int) -> bool:
        """Draw from ``trainer`` what is left out before the step of iteration ``iter``; whether that is left out, too.

        Its hooks then see the batch, and no losses.
        """
        due = self._due(iter)
        for left_out in due:
            trainer.fetch()
            self._note(left_out)  # one by one: the run may be stopped while it waits for a batch
        if self._consumes and due:
            trainer._losses = Losses({}, [], torch.zeros(()))
            return True
        return False

    def _due(self, iter: int) -> range:
        end = next((end for start, end in self._ranges if start <= iter < end), iter)
        first = max([iter, *(last for start, last in self.left_out if start <= iter)])
        return range(first, min(end, iter + 1) if self._consumes else end)

    def _note(self, iter: int) -> None:
        if self.left_out and self.left_out[-1][1] == iter:
            self.left_out[-1][1] += 1
            return
        self.left_out.append([iter, iter + 1])
        end = next(end for start, end in self._ranges if start <= iter < end)
        text = "DATALOADER.SKIP: the batches of iterations %d to %d are left out, %s"
        instead = "which make no step" if self._consumes else f"and iteration {iter} gets the next one"
        logger.info(text, iter, end - 1, instead)
