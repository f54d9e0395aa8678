"""Learning rate schedules as functions of the progress ``where``, 0 at the start and 1 at the end of training."""

from collections.abc import Mapping
from typing import Any

from fvcore.common.param_scheduler import ParamScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

# fvcore's step-like schedules add WHERE_EPSILON before they round down, and fail from 1 - WHERE_EPSILON on.
_JUST_BEFORE_END = 1.0 - 2 * ParamScheduler.WHERE_EPSILON


class KeepLastValue(ParamScheduler):
    """A schedule that keeps its last value at and past the end, where fvcore's step-like ones fail and others go on.

    The last value is the one at 1.0; for schedules that are not defined there, the one just before.
    """

    def __init__(self, scheduler: ParamScheduler) -> None:
        self._scheduler = scheduler
        try:
            scheduler(1.0)
        except Exception:  # which one is up to the schedule: fvcore's raise RuntimeError and IndexError
            self._last_where = _JUST_BEFORE_END
        else:
            self._last_where = 1.0

    def __call__(self, where: float) -> float:
        return self._scheduler(min(where, self._last_where))


class WarmupParamScheduler(ParamScheduler):
    """A schedule behind a warm-up, which starts at ``warmup_factor`` times the schedule's first value.

    Args:
        warmup_length: share of the training, in [0, 1].
        warmup_method: ``linear`` rises to the value that the schedule has when the warm-up ends, ``constant`` stays.
        rescale_interval: squeeze the whole schedule into the time behind the warm-up; if False, the warm-up replaces
            the schedule's beginning.

    Raises:
        ValueError: ``warmup_length`` or ``warmup_method`` is not accepted, or nothing is left to squeeze into.
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
            raise ValueError(f"warmup_method (SOLVER.WARMUP_METHOD) must be linear or constant, got {warmup_method!r}")
        if not 0.0 <= warmup_length <= 1.0:
            raise ValueError(f"warmup_length must be between 0 and 1, a share of the training, got {warmup_length}")
        if rescale_interval and warmup_length == 1.0:
            raise ValueError(
                "rescale_interval (SOLVER.RESCALE_INTERVAL) needs a warm-up that is shorter than the training"
            )
        self._scheduler = scheduler
        self._length = warmup_length
        self._rescale = rescale_interval
        self._start = self._end = warmup_factor * scheduler(0.0)
        if warmup_method == "linear":
            self._end = scheduler(0.0 if rescale_interval else warmup_length)

    def __call__(self, where: float) -> float:
        if where < self._length:
            done = where / self._length
            return self._start * (1.0 - done) + self._end * done
        return self._scheduler((where - self._length) / (1.0 - self._length) if self._rescale else where)


class LRMultiplier(LRScheduler):
    """Sets the learning rate of each group to its first one times ``multiplier(iter / max_iter)``.

    Like every torch scheduler, it is stepped once after each optimizer step. Past ``max_iter`` it does what the
    multiplier does there, which may be to raise; ``KeepLastValue`` makes one that does not.

    Args:
        last_iter: the iteration done last, when a training goes on; -1 at its start.

    Raises:
        TypeError: ``multiplier`` is not a ``ParamScheduler``.
        ValueError: ``max_iter`` is less than 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        multiplier: ParamScheduler,
        max_iter: int,
        last_iter: int = -1,
    ) -> None:
        if not isinstance(multiplier, ParamScheduler):
            raise TypeError(f"multiplier must be a fvcore ParamScheduler, got {multiplier!r}")
        if max_iter < 1:
            raise ValueError(f"max_iter (SOLVER.MAX_ITER) must be >= 1 iteration, got {max_iter}")
        self._multiplier = multiplier
        self._max_iter = max_iter
        super().__init__(optimizer, last_epoch=last_iter)

    def get_lr(self) -> list[float | Tensor]:
        multiplier = self._multiplier(self.last_epoch / self._max_iter)
        return [base_lr * multiplier for base_lr in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """The first learning rates and the position; the schedule and its length come from the config."""
        return {"base_lrs": [float(base_lr) for base_lr in self.base_lrs], "last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a ``state_dict``; the learning rates in use are part of the optimizer's state.

        Raises:
            ValueError: it belongs to an optimizer with another number of parameter groups.
        """
        base_lrs = list(state_dict["base_lrs"])
        if len(base_lrs) != len(self.base_lrs):
            raise ValueError(
                f"the schedule in the checkpoint is of {len(base_lrs)} parameter groups, the optimizer has "
                f"{len(self.base_lrs)}; resume with the model and the SOLVER settings of that run"
            )
        self.base_lrs = base_lrs
        self.last_epoch = state_dict["last_epoch"]
