"""Learning rates as functions of the iteration, or of ``where``: 0 at the start of training, 1 at the end."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from fvcore.common.param_scheduler import ParamScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainkit.solver.schedules import Schedule, compute_values

# fvcore's step-like schedules add WHERE_EPSILON before they round down, so they raise from 1 - WHERE_EPSILON on.
_JUST_BEFORE_END = 1.0 - 2 * ParamScheduler.WHERE_EPSILON


class KeepLastValue(ParamScheduler):
    """A schedule that keeps its last value at and after the end; fvcore's step-like schedules raise an error there.

    The last value is the value at 1.0, or just before 1.0 if the schedule is not defined there.
    """

    def __init__(self, scheduler: ParamScheduler) -> None:
        self._scheduler, self._last_where = scheduler, 1.0
        try:
            scheduler(1.0)
        except Exception:  # fvcore's schedules raise RuntimeError or IndexError, other schedules may raise anything
            self._last_where = _JUST_BEFORE_END

    def __call__(self, where: float) -> float:
        return self._scheduler(min(where, self._last_where))


class WarmupParamScheduler(ParamScheduler):
    """A schedule after a warm-up. The warm-up starts at ``warmup_factor`` times the schedule's first value.

    Args:
        warmup_length: fraction of the training, in [0, 1].
        warmup_method: ``linear`` rises to the schedule's value at the end of the warm-up; ``exponential`` rises to it
            by the same factor in each iteration; ``constant`` keeps the first value until then.
        rescale_interval: True: the whole schedule runs after the warm-up. False: the warm-up replaces the start of the
            schedule.

    Raises:
        ValueError: ``warmup_length`` or ``warmup_method`` is not accepted, no time is left for a rescaled schedule, or
            an exponential warm-up starts or ends at 0.
    """

    def __init__(
        self,
        scheduler: ParamScheduler,
        warmup_factor: float,
        warmup_length: float,
        warmup_method: str = "linear",
        rescale_interval: bool = False,
    ) -> None:
        if warmup_method not in ("linear", "constant", "exponential"):
            raise ValueError(
                f"warmup_method (SOLVER.WARMUP_METHOD) must be linear, constant or exponential, got {warmup_method!r}"
            )
        if not 0.0 <= warmup_length <= 1.0:
            raise ValueError(f"warmup_length must be between 0 and 1, a fraction of the training, got {warmup_length}")
        if rescale_interval and warmup_length == 1.0:
            raise ValueError(
                "rescale_interval (SOLVER.RESCALE_INTERVAL) needs a warm-up that is shorter than the training"
            )
        self._scheduler = scheduler
        self._length = warmup_length
        self._rescale = rescale_interval
        self._start = self._end = warmup_factor * scheduler(0.0)
        if warmup_method != "constant":
            self._end = scheduler(0.0 if rescale_interval else warmup_length)
        self._exponential = warmup_method == "exponential"
        if self._exponential and not (self._start > 0 and self._end > 0):
            raise ValueError(
                "an exponential warm-up must start and end above 0, got WARMUP_FACTOR "
                f"{warmup_factor} and a schedule that is {self._end} when it ends; use linear (SOLVER.WARMUP_METHOD)"
            )

    def __call__(self, where: float) -> float:
        if where < self._length:
            done = where / self._length
            if self._exponential:
                return self._end * (self._start / self._end) ** (1.0 - done)
            return self._start * (1.0 - done) + self._end * done
        return self._scheduler((where - self._length) / (1.0 - self._length) if self._rescale else where)


class ScheduledLR(LRScheduler):
    """A learning rate that depends on the iteration and on reductions; a subclass defines ``compute``.

    Step it once after each optimizer step, like every torch scheduler. Groups with ``fixed_lr: True`` keep their first
    learning rate.

    Args:
        last_iter: the last iteration done, if training continues; -1 at its start.

    Attributes:
        factors: every learning rate is multiplied by all of them; see ``reduce``.
    """

    def __init__(self, optimizer: Optimizer, last_iter: int = -1) -> None:
        self.factors: list[float] = []
        super().__init__(optimizer, last_epoch=last_iter)

    def compute(self, iter: int, base_lrs: list[float]) -> list[float]:
        """The learning rates in an iteration, computed from the base rates, before reductions."""
        raise NotImplementedError(f"{type(self).__name__} must define compute(iter, base_lrs)")

    def get_lr(self) -> list[float | Tensor]:
        if {*map(type, self.base_lrs)} != {float}:  # read tensors from their device once, not in each step
            self.base_lrs = [float(base_lr) for base_lr in self.base_lrs]
        base_lrs = cast(list[float], self.base_lrs)
        lrs: list[float | Tensor] = [*self.compute(self.last_epoch, base_lrs)]
        for i, group in enumerate(self.optimizer.param_groups):
            if group.get("fixed_lr"):
                lrs[i] = base_lrs[i]
            else:
                for factor in self.factors:
                    lrs[i] *= factor
        return lrs

    def step(self, epoch: int | None = None) -> None:
        """Go to the next iteration."""
        if epoch is None and self._step_count > 1:
            self._step_count += 1
            self.seek(self.last_epoch + 1)
        else:  # torch makes its checks at the first step
            super().step(epoch)

    def reduce(self, factor: float, floor: float = 0.0) -> None:
        """Multiply the learning rates by one more factor; the product of all factors stays at or above ``floor``."""
        factors = [*self.factors, factor]
        self.set_factors(factors if math.prod(factors) > floor else [floor])

    def set_factors(self, factors: Iterable[float]) -> None:
        """Replace ``factors`` and set the learning rates."""
        self.factors = list(factors)
        self.seek(self.last_epoch)

    def seek(self, iter: int) -> None:
        """Set the learning rates of an iteration."""
        self.last_epoch = iter
        lrs = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)  # in place: a captured graph reads this tensor
            else:
                group["lr"] = lr
        self._last_lr = lrs

    def state_dict(self) -> dict[str, Any]:
        """The base learning rates, iteration and factors; the schedule and its length come from the config."""
        base_lrs = [float(base_lr) for base_lr in self.base_lrs]
        return {"base_lrs": base_lrs, "last_epoch": self.last_epoch, "factors": self.factors}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; the learning rates in use are part of the optimizer's state.

        Raises:
            ValueError: the state is for another number of parameter groups.
        """
        base_lrs = list(state_dict["base_lrs"])
        if len(base_lrs) != len(self.base_lrs):
            raise ValueError(
                f"the schedule in the checkpoint is of {len(base_lrs)} parameter groups, the optimizer has "
                f"{len(self.base_lrs)}; resume with the model and the SOLVER settings of that run"
            )
        self.base_lrs = base_lrs
        self.last_epoch = state_dict["last_epoch"]
        self.factors = list(state_dict.get("factors", []))  # older states have no factors


class LRMultiplier(ScheduledLR):
    """Sets the learning rate of each group to its base rate times ``multiplier(iter / max_iter)``.

    After ``max_iter`` some multipliers raise an error; wrap them in ``KeepLastValue``.

    Raises:
        TypeError: ``multiplier`` is not a ``ParamScheduler``.
        ValueError: ``max_iter`` is less than 1.
    """

    def __init__(self, optimizer: Optimizer, multiplier: ParamScheduler, max_iter: int, last_iter: int = -1) -> None:
        if not isinstance(multiplier, ParamScheduler):
            raise TypeError(f"multiplier must be a fvcore ParamScheduler, got {multiplier!r}")
        if max_iter < 1:
            raise ValueError(f"max_iter (SOLVER.MAX_ITER) must be >= 1 iteration, got {max_iter}")
        self._multiplier = multiplier
        self._max_iter = max_iter
        super().__init__(optimizer, last_iter)

    def compute(self, iter: int, base_lrs: list[float]) -> list[float]:
        multiplier = self._multiplier(iter / self._max_iter)
        return [base_lr * multiplier for base_lr in base_lrs]


class LRFunction(ScheduledLR):
    """Sets the learning rate of each group to ``schedule(iter, base rate)``; see `trainkit.solver.schedules`.

    Raises:
        TypeError: ``schedule`` cannot be called.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule, last_iter: int = -1) -> None:
        if not callable(schedule):
            raise TypeError(f"schedule must be a function of the iteration and the first value, got {schedule!r}")
        self._schedule = schedule
        super().__init__(optimizer, last_iter)

    def compute(self, iter: int, base_lrs: list[float]) -> list[float]:
        return compute_values(self._schedule, iter, base_lrs)


class WarmupMultiStepLR(ScheduledLR):
    """The base rate times ``gamma ** (number of milestones passed)`` times the warm-up; for detectron2 users' code.

    Raises:
        ValueError: the milestones are not in ascending order.
    """

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
        if list(milestones) != sorted(milestones):
            raise ValueError(f"milestones must be in ascending order, got {milestones}")
        self.milestones, self.gamma = milestones, gamma
        self.warmup_factor, self.warmup_iters, self.warmup_method = warmup_factor, warmup_iters, warmup_method
        super().__init__(optimizer, last_epoch)

    def compute(self, iter: int, base_lrs: list[float]) -> list[float]:
        warmup = _get_warmup_factor_at_iter(self.warmup_method, iter, self.warmup_iters, self.warmup_factor)
        return [base_lr * warmup * self.gamma ** bisect_right(self.milestones, iter) for base_lr in base_lrs]


class WarmupCosineLR(ScheduledLR):
    """Half a cosine, down to 0 after ``max_iters`` iterations, times the warm-up factor; for detectron2 users' code."""

    def __init__(
        self,
        optimizer: Optimizer,
        max_iters: int,
        warmup_factor: float = 0.001,
        warmup_iters: int = 1000,
        warmup_method: str = "linear",
        last_epoch: int = -1,
    ) -> None:
        self.max_iters = max_iters
        self.warmup_factor, self.warmup_iters, self.warmup_method = warmup_factor, warmup_iters, warmup_method
        super().__init__(optimizer, last_epoch)

    def compute(self, iter: int, base_lrs: list[float]) -> list[float]:
        warmup = _get_warmup_factor_at_iter(self.warmup_method, iter, self.warmup_iters, self.warmup_factor)
        return [base_lr * warmup * 0.5 * (1.0 + math.cos(math.pi * iter / self.max_iters)) for base_lr in base_lrs]


def _get_warmup_factor_at_iter(method: str, iter: int, warmup_iters: int, warmup_factor: float) -> float:
    """The factor of the warm-up in an iteration; detectron2 users' schedules call it."""
    if method not in ("linear", "constant"):
        raise ValueError(f"the method of a warm-up must be linear or constant, got {method!r}")
    if iter >= warmup_iters:
        return 1.0
    done = iter / warmup_iters if method == "linear" else 0.0
    return warmup_factor * (1.0 - done) + done
