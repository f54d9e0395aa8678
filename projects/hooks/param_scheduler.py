"""Hooks that change the optimizer: schedules for any field, and lower rates when a metric no longer improves."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from trainkit.projects.solver_extras.schedules import build_schedule

from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, SAVE_POINT, HookBase
from trainkit.engine.hooks.lr_scheduler import LRScheduler
from trainkit.engine.hooks.monitor import MetricHook, Mode
from trainkit.solver.lr_scheduler import Schedule, ScheduledLR
from trainkit.utils.periods import check_number, check_period, is_number


@HOOK_REGISTRY.register()
class ParamScheduler(HookBase):
    """Set a field of the optimizer's parameter groups to a function of the iteration, and store the value in use.

    The base values stay in the groups as ``initial_<param>``, and so in the optimizer's state. Groups without the field
    are not changed; if no group has it, this is an error before training. The stored value is that of the group with
    the most elements.

    Args:
        param: the key of a number in the groups, such as ``weight_decay``; ``betas.0`` and ``betas.1`` for items;
            ``momentum`` means ``betas.0`` in a group with betas. ``lr`` works only without an `LRScheduler` hook.
        schedules: a list as for `trainkit.solver.build_schedule`, or one function of the iteration and the base value.
        max_iter: the END of entries that give none; default is the ``max_iter`` of each ``train()`` call.
    """

    priority = 46  # after the learning rate
    config_keys = (("max_iter", "SOLVER.MAX_ITER"),)

    def __init__(
        self,
        param: str,
        schedules: Sequence[Mapping[str, Any]] | Schedule,
        max_iter: int | None = None,
    ) -> None:
        self.param = param
        self._given = schedules
        if max_iter is not None:
            max_iter = check_period("max_iter", max_iter, minimum=1)
        self._max_iter = max_iter
        self._build(2**40)  # raises its errors now; the length of the run is not known yet

    def _build(self, max_iter: int) -> Schedule:
        if callable(self._given):
            return self._given
        return build_schedule(self._given, max_iter, f"ParamScheduler of {self.param}")

    def before_train(self) -> None:
        if self.param == "lr" and any(isinstance(hook, LRScheduler) for hook in self.trainer.hooks):
            raise ConfigError(
                "ParamScheduler of lr and LRScheduler both set the rate; use SOLVER.SCHEDULES"
            )
        self._schedule = self._build(self._max_iter or self.trainer.max_iter)
        self._targets = self._find_targets()
        name = f"initial_{self.param}"
        self._bases: list[float] = []
        sizes: list[int] = []
        for group, key, index in self._targets:
            # read from the device once, not in each step
            present = float(_get(group, key, index))
            self._bases.append(float(group.setdefault(name, present)))
            sizes.append(sum(parameter.numel() for parameter in group["params"]))
        self._shown = sizes.index(max(sizes))
        self._set(self.trainer.next_iter_of(self))

    def _find_targets(self) -> list[tuple[dict[str, Any], str, int | None]]:
        """Where the number is: (group, key, index); see `_fields`. Raises ConfigError if no group has it."""
        targets = []
        accepted: set[str] = set()
        for group in self.trainer.optimizer.param_groups:
            fields = _fields(group)
            accepted |= fields.keys()
            is_fixed = self.param == "lr" and group.get("fixed_lr")
            if self.param in fields and not is_fixed:
                key, index = fields[self.param]
                targets.append((group, key, index))
        if not targets:
            raise ConfigError(
                f"ParamScheduler: no parameter group has {self.param!r}; accepted: "
                f"{sorted(accepted)}"
            )
        return targets

    def after_step(self) -> None:
        self.trainer.storage.put_scalar(self.param, self._values[self._shown], smoothing_hint=False)
        self._set(self.trainer.iter + 1)

    def _set(self, iter: int) -> None:
        self._values = [self._schedule(iter, base) for base in self._bases]
        for (group, key, index), value in zip(self._targets, self._values, strict=True):
            old = _get(group, key, index)
            if isinstance(old, Tensor):
                old.fill_(value)  # in place: a captured graph reads this tensor
            elif index is None:
                group[key] = value
            else:
                items = list(group[key])
                items[index] = value
                group[key] = tuple(items)


def _fields(group: dict[str, Any]) -> dict[str, tuple[str, int | None]]:
    """name -> where the number is in the group: (key, None), or (key, index) for an item of ``betas``."""
    fields: dict[str, tuple[str, int | None]] = {}
    if "betas" in group:
        fields["momentum"] = ("betas", 0)
        fields["betas.0"] = ("betas", 0)
        fields["betas.1"] = ("betas", 1)
    for key, value in group.items():
        if isinstance(value, Tensor) or is_number(value):
            fields[key] = (key, None)
    return fields


def _get(group: dict[str, Any], key: str, index: int | None) -> Any:
    return group[key] if index is None else group[key][index]


logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class ReduceOnPlateau(MetricHook):
    """Multiply the learning rate by ``factor`` after more than ``patience`` evaluations without a better value.

    It decides like torch's ``ReduceLROnPlateau``; the trainer's scheduler, which an `LRScheduler` hook steps, keeps the
    factor and sets the rate.

    Args:
        threshold: a value is better only if it beats the best one by this fraction of the best ("rel") or by this
            difference ("abs").
        cooldown: number of evaluations after a reduction that are not counted.
        min_factor: the product of all reductions stays at or above it.
        min_lr: no reduction lowers a learning rate below this; a list has a number for each parameter group. A schedule
            that is lower itself is not raised.
    """

    priority = SAVE_POINT + 2  # after the evaluation, before the best checkpoint
    _state_names = (*MetricHook._state_names, "_cooling")

    def __init__(
        self,
        eval_period: int,
        val_metric: str,
        mode: Mode = "auto",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: Literal["rel", "abs"] = "rel",
        cooldown: int = 0,
        min_factor: float = 0.0,
        min_lr: float | Sequence[float] = 0.0,
    ) -> None:
        check_period("eval_period", eval_period, minimum=1)
        check_number("factor", factor, "[0, 1)")
        check_period("patience", patience)
        check_number("threshold", threshold, "[0, inf)")
        if threshold_mode not in ("rel", "abs"):
            raise ValueError(f'threshold_mode must be "rel" or "abs", got {threshold_mode!r}')
        check_period("cooldown", cooldown)
        check_number("min_factor", min_factor, "[0, 1]")
        bounds: Any = min_lr if isinstance(min_lr, list | tuple) else [min_lr]
        for bound in bounds:
            check_number("min_lr", bound, "[0, inf)")
        super().__init__(eval_period, val_metric, mode, threshold)
        self._factor = factor
        self._min_factor = min_factor
        self._is_relative = threshold_mode == "rel"
        self._patience = patience
        self._cooldown = cooldown
        self._min_lr: Any = min_lr

    def _forget(self) -> None:
        super()._forget()
        self._cooling = 0

    def before_train(self) -> None:
        """Raises ConfigError if ``trainer.scheduler`` cannot be reduced, or has another number of groups."""
        super().before_train()
        scheduler = getattr(self.trainer, "scheduler", None)
        if not isinstance(scheduler, ScheduledLR):
            raise ConfigError(
                f"ReduceOnPlateau needs a trainer.scheduler of trainkit, got {scheduler!r}"
            )
        num_groups = len(scheduler.base_lrs)
        if isinstance(self._min_lr, list | tuple):
            scheduler.min_lrs = [*self._min_lr]
        else:
            scheduler.min_lrs = [self._min_lr] * num_groups
        if len(scheduler.min_lrs) != num_groups:
            raise ConfigError(
                f"ReduceOnPlateau: min_lr has {len(scheduler.min_lrs)} numbers, but the "
                f"optimizer has {num_groups} "
                "parameter groups; give a number for each, or one number for all"
            )
        if self.trainer.start_iter == 0:
            self._set_factors([])
        else:
            scheduler.refresh()  # LRScheduler has set the rates before it knew the bounds

    def bound(self, best: float) -> float:
        if not self._is_relative:
            return super().bound(best)
        return best * (1.0 + self._sign * self._min_delta)

    def judge(self, value: float) -> bool:
        if self._cooling > 0:
            self._cooling -= 1
            self.not_better = 0
        is_over = self.not_better > self._patience
        if is_over:
            self._cooling = self._cooldown
            self.not_better = 0
        return is_over

    def act(self, decision: bool) -> None:
        factors = [*self.trainer.scheduler.factors, self._factor]
        if math.prod(factors) <= self._min_factor:
            factors = [self._min_factor]
        self._set_factors(factors)

    def _set_factors(self, factors: list[float]) -> None:
        scheduler = self.trainer.scheduler
        if factors:
            text = "%s is no longer better; the learning rate is multiplied by %g from now on"
            logger.info(text, self.monitored_metric, math.prod(factors))
        scheduler.factors = factors
        scheduler.seek(scheduler.last_epoch)
