"""The config keys of this project, and the hook that leaves out the batches of some iterations (DATALOADER.SKIP)."""

import logging
from collections.abc import Sequence
from itertools import chain
from typing import Any

from trainkit.config import CfgNode
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils.errors import not_accepted
from trainkit.utils.periods import is_whole


def add_config(cfg: CfgNode) -> None:
    # The run starts with the state of another run; --fork sets these keys.
    cfg.FORK = CfgNode()
    # The folder with the checkpoints of the other run. "": no fork.
    cfg.FORK.RUN = ""
    # The iteration of the checkpoint.
    cfg.FORK.ITER = -1
    # [key, value in the other run, value in this run], written by --fork.
    cfg.FORK.CHANGES = []
    # [[100, 120]]: leave out the batches of iterations 100 to 119, counted from 0.
    cfg.DATALOADER.SKIP = []
    # The only mode: later batches move up.
    cfg.DATALOADER.SKIP_MODE = "shift"


def check(cfg: CfgNode) -> None:
    pairs, mode = cfg.DATALOADER.get("SKIP", []), cfg.DATALOADER.get("SKIP_MODE", "shift")
    if not _are_ranges(pairs):
        raise not_accepted("DATALOADER.SKIP", pairs, _RANGES)
    if "FORK" in cfg and cfg.FORK.ITER >= 0 and not cfg.FORK.RUN:
        raise not_accepted("FORK.ITER", cfg.FORK.ITER, "an iteration of FORK.RUN, which is empty")
    if pairs and mode != "shift":
        raise not_accepted("DATALOADER.SKIP_MODE", mode, "'shift'")


_RANGES = "a list of [start, end], whole numbers from 0 on, which grow"


def _are_ranges(pairs: Any) -> bool:
    if not isinstance(pairs, list | tuple):
        return False
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        return False
    numbers: list[Any] = [*chain(*pairs)]
    return all(is_whole(number, 0) for number in numbers) and numbers == sorted({*numbers})


def prepare(cfg: CfgNode) -> None:
    entry = {"NAME": "SkipBatches", "RANGES": cfg.DATALOADER.get("SKIP")}
    if entry["RANGES"] and entry not in cfg.HOOKS:  # in the config of a trainer it is already
        cfg.HOOKS = [*cfg.HOOKS, entry]


logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class SkipBatches(HookBase):
    """Draw the batches of some iterations and throw them away, so that later batches take their places.

    ``ranges``: ``[start, end]`` of each range in increasing order; ``end`` is not included.
    """

    # [start, end] of what was thrown away, so that a resumed run does not do it again
    _state_names = ("_left_out",)

    def __init__(self, ranges: Sequence[Sequence[int]]) -> None:
        if not _are_ranges(ranges):
            raise ValueError(f"ranges must be {_RANGES}, got {ranges!r}")
        self._ranges = ranges
        self._left_out: list[list[int]] = []

    def before_train(self) -> None:
        start_iter = self.trainer.start_iter
        # not those of an earlier run
        self._left_out = [pair for pair in self._left_out if pair[0] < start_iter]
        for start, end in self._ranges:
            if end <= start_iter and not any(
                first < end and start < last for first, last in self._left_out
            ):
                text = "DATALOADER.SKIP: nothing of [%d, %d] is left out, since the run continues with iteration %d"
                logger.warning(text, start, end, start_iter)

    def before_step(self) -> None:
        iter = self.trainer.iter
        end = next((end for start, end in self._ranges if start <= iter < end), iter)
        first = max([iter, *(last for start, last in self._left_out if start <= iter)])
        if first < end:
            text = (
                "DATALOADER.SKIP: the batches of iterations %d to %d are left out, "
                "and iteration %d gets the next one"
            )
            logger.info(text, first, end - 1, iter)
            for _ in range((end - first) * self.trainer.accumulation_steps):
                self.trainer.fetch()
            self._left_out = [*self._left_out, [first, end]]
