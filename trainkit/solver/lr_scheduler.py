"""Learning rates as functions of the iteration, or of ``where``.

``where`` is 0 at the start of training and 1 at the end.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from fvcore.common.param_scheduler import ParamScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainkit.utils.periods import check_number, check_period
from trainkit.utils.plugins import lending

__getattr__, __dir__ = lending(__name__)


Schedule: TypeAlias = Callable[[int, float], float]
"""``schedule(iter, base)`` is the value in an iteration; ``base``: the first value of the group."""


class WarmupParamScheduler(ParamScheduler):
    """A schedule after a warm-up.

    Args:
        warmup_factor: the warm-up starts at this times the schedule's first value.
        warmup_length: fraction of the training, in [0, 1].
        warmup_method: ``linear`` rises to the schedule's value at the end of the warm-up;
            ``constant`` keeps the first value until then.
        rescale_interval: True: the whole schedule runs after the warm-up. False: the warm-up
            replaces the start of the schedule.
    """

    def __init__(
        self,
        scheduler: ParamScheduler,
        warmup_factor: float,
        warmup_length: float,
        warmup_method: str = "linear",
        rescale_interval: bool = False,
    ) -> None:
        if warmup_method not in ("linear", "constant"):
            raise ValueError(f"warmup_method must be linear or constant, got {warmup_method!r}")
        if not 0.0 <= warmup_length <= 1.0 or (rescale_interval and warmup_length == 1.0):
            raise ValueError(
                "warmup_length must be in [0, 1], below 1 with rescale_interval, got "
                f"{warmup_length}"
            )
        check_number("warmup_factor", warmup_factor, "[0, inf)")
        self._scheduler = scheduler
        self._length = warmup_length
        self._rescale = rescale_interval
        # the values at both ends of the warm-up
        self._start = warmup_factor * scheduler(0.0)
        if warmup_method == "constant":
            self._end = self._start
        elif rescale_interval:
            self._end = scheduler(0.0)
        else:
            self._end = scheduler(min(warmup_length, _last_where(scheduler)))

    def __call__(self, where: float) -> float:
        if where < self._length:
            done = where / self._length
            return self._start * (1.0 - done) + self._end * done
        if self._rescale:
            where = (where - self._length) / (1.0 - self._length)
        return self._scheduler(where)


def _last_where(scheduler: ParamScheduler) -> float:
    """Where a schedule has its last value: at 1, or just before it."""
    try:
        scheduler(1.0)
    # fvcore's step-like schedules raise an error there; others may raise anything
    except Exception:
        return 1.0 - 2 * ParamScheduler.WHERE_EPSILON
    return 1.0


def _check_is_function(name: str, given: Any) -> None:
    if not callable(given) or isinstance(given, type):
        raise TypeError(
            f"{name} must be a function that gives a rate, got {given!r:.80}; a scheduler of torch "
            "goes to the hook: LRScheduler(optimizer, scheduler)"
        )


class ScheduledLR(LRScheduler):
    """Sets the learning rate of each parameter group to ``schedule(iter, base rate)``.

    Step it once after each optimizer step. Groups with ``fixed_lr: True`` keep their base rate. The
    base rate of a group is its ``initial_lr``; a group that is added later and has none gets its
    ``lr`` as its base rate.

    Args:
        last_iter: the last iteration done, if training continues; -1 at its start.

    Attributes:
        factors: all of them multiply the rate.
        min_lrs: for each group, the number below which the factors lower no rate; an empty list
            is 0 for all.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule, last_iter: int = -1) -> None:
        _check_is_function("schedule", schedule)
        # not torch's constructor, which replaces optimizer.step()
        self.optimizer = optimizer
        self.schedule = schedule
        self.factors: list[float] = []
        self.min_lrs: list[float] = []
        self.seek(last_iter + 1)

    @property  # type: ignore[override]
    def base_lrs(self) -> list[float]:
        """The base rate of each group. The groups hold them, so they stay with their parameters."""
        return [_base_lr_of(group) for group in self.optimizer.param_groups]

    @base_lrs.setter
    def base_lrs(self, base_lrs: list[float]) -> None:
        for group, base in zip(self.optimizer.param_groups, base_lrs, strict=True):
            group["initial_lr"] = base

    def step(self, epoch: int | None = None) -> None:
        """Set the learning rates of the next iteration, or of iteration ``epoch``."""
        if epoch is None:
            epoch = self.last_epoch + 1
        self.last_epoch = epoch
        self._last_lr = self._rates()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            _set_lr(group, lr)

    def seek(self, iter: int) -> None:
        """Set the learning rates of iteration ``iter``."""
        self.step(iter)

    def refresh(self) -> None:
        """Set the rates of the present iteration by the present schedule.

        A rate that somebody has changed since the last step stays. The rate of a group that the
        last step did not know, or whose place has changed, counts as changed.
        """
        rates = self._rates()
        for group, last, lr in zip(self.optimizer.param_groups, self._last_lr, rates, strict=False):
            if float(group["lr"]) == last:
                _set_lr(group, lr)
        self._last_lr = rates

    def _rates(self) -> list[float | Tensor]:
        """The rate of each group in iteration ``last_epoch``."""
        scheduled: dict[float, float] = {}  # base rate -> value of the schedule
        rates: list[float | Tensor] = []
        for number, group in enumerate(self.optimizer.param_groups):
            base = _base_lr_of(group)
            if base not in scheduled:
                scheduled[base] = self.schedule(self.last_epoch, base)
            if group.get("fixed_lr"):
                rates.append(base)
                continue
            lr = scheduled[base]
            min_lr = 0.0
            if number < len(self.min_lrs):  # a group may have been added later
                min_lr = self.min_lrs[number]
            lowest = min(min_lr, lr)  # the minimum raises no rate of the schedule
            lowered = math.prod(self.factors, start=lr)
            rates.append(max(lowered, lowest))
        return rates

    def state_dict(self) -> dict[str, Any]:
        """The iteration, factors and present rates.

        The schedule and its length come from the config. The base rates are for readers: when a
        state is loaded, those in the optimizer's groups count.
        """
        return {
            "base_lrs": self.base_lrs,
            "last_epoch": self.last_epoch,
            "factors": self.factors,
            "last_lr": self._last_lr,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state.

        The learning rates in use, and the base rates, are part of the optimizer's state.
        """
        last_epoch = check_period("last_epoch", state_dict["last_epoch"], minimum=-1)
        # states of detectron2 have neither
        factors = [float(factor) for factor in state_dict.get("factors", [])]
        last_lr: list[float | Tensor] = [float(rate) for rate in state_dict.get("last_lr", [])]
        self.last_epoch = last_epoch
        self.factors = factors
        self._last_lr = last_lr


def _set_lr(group: dict[str, Any], lr: float | Tensor) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)  # in place: a captured graph reads this tensor
    else:
        group["lr"] = lr


def _base_lr_of(group: dict[str, Any]) -> float:
    """The base rate; the ``lr`` of a group becomes its base rate when it is seen first."""
    base = group.get("initial_lr", group["lr"])
    if not isinstance(base, float) or "initial_lr" not in group:
        base = float(base)  # once: to read a tensor on a device is to wait for the device
        group["initial_lr"] = base
    return base


LRFunction = ScheduledLR
"""The same class under another public name."""


class LRMultiplier(ScheduledLR):
    """The base rate times ``multiplier(iter / max_iter)``.

    After the end the multiplier's last value stays.
    """

    def __init__(
        self, optimizer: Optimizer, multiplier: ParamScheduler, max_iter: int, last_iter: int = -1
    ) -> None:
        check_period("max_iter", max_iter, minimum=1)
        _check_is_function("multiplier", multiplier)
        last_where = _last_where(multiplier)

        def schedule(iter: int, base: float) -> float:
            where = min(iter / max_iter, last_where)
            return base * multiplier(where)

        super().__init__(optimizer, schedule, last_iter)
