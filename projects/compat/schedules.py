"""Schedules that older code of detectron2's users builds by hand."""

import math
from bisect import bisect_right
from collections.abc import Sequence

from fvcore.common.param_scheduler import ParamScheduler
from torch.optim import Optimizer

from trainkit.solver.lr_scheduler import ScheduledLR
from trainkit.utils.periods import check_number, check_period


class WarmupMultiStepLR(ScheduledLR):
    """The base rate times ``gamma`` for each milestone passed, times the warm-up."""

    def __init__(
        self,
        optimizer: Optimizer,
        milestones: Sequence[int],
        gamma: float = 0.1,
        warmup_factor: float = 0.001,
        warmup_iters: int = 1000,
        warmup_method: str = "linear",
        last_epoch: int = -1,
    ) -> None:
        check_number("gamma", gamma, "[0, inf)")
        _check_warmup(warmup_factor, warmup_iters)

        def schedule(iter: int, base: float) -> float:
            warmup = _get_warmup_factor_at_iter(warmup_method, iter, warmup_iters, warmup_factor)
            return base * warmup * gamma ** bisect_right(sorted(milestones), iter)

        super().__init__(optimizer, schedule, last_epoch)


class WarmupCosineLR(ScheduledLR):
    """Half a cosine, down to 0 after ``max_iters`` iterations, times the warm-up."""

    def __init__(
        self,
        optimizer: Optimizer,
        max_iters: int,
        warmup_factor: float = 0.001,
        warmup_iters: int = 1000,
        warmup_method: str = "linear",
        last_epoch: int = -1,
    ) -> None:
        check_period("max_iters", max_iters, minimum=1)
        _check_warmup(warmup_factor, warmup_iters)

        def schedule(iter: int, base: float) -> float:
            warmup = _get_warmup_factor_at_iter(warmup_method, iter, warmup_iters, warmup_factor)
            return base * warmup * 0.5 * (1.0 + math.cos(math.pi * iter / max_iters))

        super().__init__(optimizer, schedule, last_epoch)


def _check_warmup(factor: float, iters: int) -> None:
    check_number("warmup_factor", factor, "[0, inf)")
    check_period("warmup_iters", iters)


def _get_warmup_factor_at_iter(
    method: str, iter: int, warmup_iters: int, warmup_factor: float
) -> float:
    if method not in ("linear", "constant"):
        raise ValueError(f"the method of a warm-up must be linear or constant, got {method!r}")
    if iter >= warmup_iters:
        return 1.0
    done = iter / warmup_iters if method == "linear" else 0.0
    return warmup_factor * (1.0 - done) + done


class KeepLastValue(ParamScheduler):
    """A schedule that keeps its last value from the end on; `LRMultiplier` does so itself."""

    def __init__(self, scheduler: ParamScheduler) -> None:
        self._scheduler = scheduler

    def __call__(self, where: float) -> float:
        try:
            return self._scheduler(min(where, 1.0))
        # fvcore's step-like schedules end just before 1; others may raise anything
        except Exception:
            return self._scheduler(1.0 - 2 * self.WHERE_EPSILON)
