"""Schedules for any field of the optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from trainkit.projects.solver_extras.composed import build_schedule

from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.engine.hooks.lr_scheduler import LRScheduler
from trainkit.solver.lr_scheduler import Schedule
from trainkit.utils.periods import is_number


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
        self, param: str, schedules: Sequence[Mapping[str, Any]] | Schedule, max_iter: int | None = None
    ) -> None:
        self.param, self._given, self._max_iter = param, schedules, max_iter
        self._build(2**40)  # raises its errors now; the length of the run is not known yet

    def _build(self, max_iter: int) -> Schedule:
        given, where = self._given, f"ParamScheduler of {self.param}"
        return given if callable(given) else build_schedule(given, max_iter, where)

    def before_train(self) -> None:
        if self.param == "lr" and any(isinstance(hook, LRScheduler) for hook in self.trainer.hooks):
            raise ConfigError("ParamScheduler of lr and LRScheduler both set the rate; use SOLVER.SCHEDULES")
        self._schedule = self._build(self._max_iter or self.trainer.max_iter)
        groups = self.trainer.optimizer.param_groups
        used = [group for group in groups if not (self.param == "lr" and group.get("fixed_lr"))]
        self._targets = [(group, *_fields(group)[self.param]) for group in used if self.param in _fields(group)]
        if not self._targets:
            accepted = sorted({name for group in groups for name in _fields(group)})
            raise ConfigError(f"ParamScheduler: no parameter group has {self.param!r}; accepted: {accepted}")
        name, self._bases, sizes = f"initial_{self.param}", list[float](), list[int]()
        for group, key, index in self._targets:
            # read from the device once, not in each step
            self._bases.append(float(group.setdefault(name, float(_get(group, key, index)))))
            sizes.append(sum(parameter.numel() for parameter in group["params"]))
        self._shown = sizes.index(max(sizes))
        self._set(self.trainer.next_iter_of(self))

    def after_step(self) -> None:
        self.trainer.storage.put_scalar(self.param, self._values[self._shown], smoothing_hint=False)
        self._set(self.trainer.iter + 1)

    def _set(self, iter: int) -> None:
        self._values = [self._schedule(iter, base) for base in self._bases]
        for (group, key, index), value in zip(self._targets, self._values, strict=True):
            old = _get(group, key, index)
            if isinstance(old, Tensor):
                old.fill_(value)  # in place: a captured graph reads this tensor
            else:
                group[key] = value if index is None else (*group[key][:index], value, *group[key][index + 1 :])


def _fields(group: dict[str, Any]) -> dict[str, tuple[str, int | None]]:
    """name -> where the number is in the group: (key, None), or (key, index) for an item of ``betas``."""
    numbers = [key for key, value in group.items() if isinstance(value, Tensor) or is_number(value)]
    betas = {"momentum": ("betas", 0), "betas.0": ("betas", 0), "betas.1": ("betas", 1)} if "betas" in group else {}
    return {**betas, **{key: (key, None) for key in numbers}}


def _get(group: dict[str, Any], key: str, index: int | None) -> Any:
    return group[key] if index is None else group[key][index]
