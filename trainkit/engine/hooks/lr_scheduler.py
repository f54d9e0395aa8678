"""The hook that sets the learning rate."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fvcore.common.param_scheduler import ParamScheduler
from torch.optim.lr_scheduler import LRScheduler as TorchLRScheduler

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.solver.lr_scheduler import LRMultiplier, ScheduledLR
from trainkit.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_PROGRESS = {"last_epoch", "base_lrs"}  # of a scheduler's state; the optimizer has the rates


@HOOK_REGISTRY.register()
class LRScheduler(HookBase):
    """Step a schedule after each iteration, and store the ``lr`` that the iteration used.

    The ``lr`` is that of the largest parameter group; if each group has one parameter, the most
    common one. It is stored from the first update of the optimizer on: the rate of an optimizer
    that is not used says nothing.

    The ``lr`` of a parameter group that is added during training is its base rate, which the
    schedule multiplies.

    Args:
        optimizer: default is ``trainer.optimizer``.
        scheduler: a torch scheduler, stepped once per iteration; or an fvcore ``ParamScheduler``, a
            factor of the base learning rate over the whole run, which keeps its last value at the
            end. Default is ``trainer.scheduler``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: TorchLRScheduler | ParamScheduler | None = None,
    ) -> None:
        if isinstance(scheduler, type):
            raise TypeError(
                f"scheduler must be an object, got the class {scheduler.__name__}; write "
                f"{scheduler.__name__}(optimizer, ...)"
            )
        self._given_optimizer = optimizer
        self._given_scheduler = scheduler
        self._scheduler: TorchLRScheduler | None = None  # of the current or last run
        self._is_used = True  # whether the optimizer has made an update
        self._update_handle: Any = None  # of the function that notes the first update

    def before_train(self) -> None:
        """Raises ValueError if the schedule belongs to another optimizer."""
        self._optimizer = self._given_optimizer or self.trainer.optimizer
        groups = self._optimizer.param_groups
        next_iter = self.trainer.next_iter_of(self)
        scheduler = self._torch_scheduler(next_iter)
        # compare the groups, not the optimizers: an optimizer may be wrapped
        scheduled_optimizer = getattr(scheduler, "optimizer", self._optimizer)
        if scheduled_optimizer.param_groups is not groups:
            raise ValueError(
                "LRScheduler has a scheduler that changes the learning rates of another optimizer"
            )
        _check_base_rates(scheduler, groups)
        if isinstance(scheduler, ScheduledLR):
            if scheduler.last_epoch != next_iter:
                scheduler.seek(next_iter)  # this may be a second run
            else:
                scheduler.refresh()  # a resumed run may have another schedule than its checkpoint
        self._scheduler = scheduler
        self._num_groups = len(groups)
        self._note_first_update()
        self._best_param_group_id = self.get_best_param_group_id(self._optimizer)
        if len(groups) > 1:
            logger.info(
                "The lr shown is that of parameter group %d of %d",
                self._best_param_group_id + 1,
                len(groups),
            )

    def _torch_scheduler(self, next_iter: int) -> Any:
        """The scheduler of this run; one that continues at ``next_iter`` for a ParamScheduler."""
        scheduler = self._given_scheduler or self.trainer.scheduler
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(
                "ReduceLROnPlateau needs a metric; use the hook ReduceOnPlateau, not LRScheduler "
                "with it"
            )
        if isinstance(scheduler, ParamScheduler):  # it has no state to load
            return LRMultiplier(
                self._optimizer, scheduler, self.trainer.max_iter, last_iter=next_iter - 1
            )
        return scheduler

    def _note_first_update(self) -> None:
        """Set ``_is_used`` at the first update of the optimizer."""
        if self._update_handle is not None:  # of an earlier run
            self._update_handle.remove()
            self._update_handle = None
        optimizer = self._optimizer
        can_be_asked = isinstance(optimizer, torch.optim.Optimizer)
        self._is_used = not can_be_asked or "lr" in self.trainer.storage.histories()
        self._has_warned = False
        if self._is_used:
            return

        def note(*args: Any) -> None:
            self._is_used = True

        self._update_handle = optimizer.register_step_post_hook(note)

    def after_step(self) -> None:
        if self._update_handle is not None:
            self._look_for_update()
        groups = self._optimizer.param_groups
        if self._is_used:
            lr = groups[self._best_param_group_id]["lr"]
            self.trainer.storage.put_scalar("lr", lr, smoothing_hint=False)
        if len(groups) == self._num_groups:
            self._scheduler.step()  # type: ignore[union-attr]
        else:
            self._step_with_new_groups()

    def _look_for_update(self) -> None:
        """Stop waiting for the first update if there was one, else warn once."""
        if self._is_used:
            self._update_handle.remove()
            self._update_handle = None
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The optimizer of LRScheduler (%s) made no update in iteration %d, counted from 0: "
                "`lr` is stored from its first update on. If your run_step() uses other optimizers, "
                "register LRScheduler(optimizer, scheduler) for them, or store their rates by "
                "storage.put_scalar()",
                type(self._optimizer).__name__,
                self.trainer.iter,
            )

    def _step_with_new_groups(self) -> None:
        """Step the scheduler after groups were added to the optimizer.

        Raises ValueError if the scheduler has no rate for an added group.
        """
        groups = self._optimizer.param_groups
        try:
            self._scheduler.step()  # type: ignore[union-attr]
        except (LookupError, ValueError) as error:
            raise ValueError(
                f"the optimizer had {self._num_groups} parameter groups when training started, "
                f"and has {len(groups)} now: {type(self._scheduler).__name__} has no rate for "
                "what was added. Give the optimizer all groups before its scheduler is made (a "
                "group may have frozen parameters), or use a schedule of trainkit, as "
                "SOLVER.LR_SCHEDULER_NAME builds"
            ) from error
        if isinstance(self._scheduler, ScheduledLR):
            added = [group["initial_lr"] for group in groups[self._num_groups :]]
            self._num_groups = len(groups)
            logger.info(
                "Parameter groups were added; their lr, %s, are base rates, which the schedule "
                "multiplies",
                added,
            )

    @property
    def scheduler(self) -> TorchLRScheduler | ParamScheduler | None:
        """The scheduler that is stepped."""
        return self._scheduler or self._given_scheduler or getattr(self.trainer, "scheduler", None)

    @staticmethod
    def get_best_param_group_id(optimizer: torch.optim.Optimizer) -> int:
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if max(sizes) > 1:
            return sizes.index(max(sizes))
        rates = [group["lr"] for group in optimizer.param_groups]
        [(most_common_rate, _)] = Counter(rates).most_common(1)
        return rates.index(most_common_rate)

    def _scheduler_with_state(self) -> TorchLRScheduler | None:
        """The torch scheduler.

        None for a ``ParamScheduler``, which is a function of the iteration.
        """
        scheduler = self._given_scheduler or getattr(self.trainer, "scheduler", None)
        return scheduler if isinstance(scheduler, TorchLRScheduler) else None

    def saved_objects(self) -> Sequence[Any]:
        scheduler = self._scheduler_with_state()
        return () if scheduler is None else (scheduler,)

    def state_dict(self) -> dict[str, Any]:
        scheduler = self._scheduler_with_state()
        return {} if scheduler is None else scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the scheduler; does nothing during a run.

        A scheduler of torch takes its lengths from the state too; those that differ are logged.
        """
        scheduler = self._scheduler_with_state()
        if scheduler is None or (self.trainer is not None and self.trainer.status == "running"):
            return
        own = scheduler.state_dict()
        scheduler.load_state_dict(state_dict)
        loaded = scheduler.state_dict()
        settings = own.keys() & loaded.keys() - _PROGRESS
        changed = []
        for name in settings:
            if name.startswith("_"):
                continue
            if repr(own[name]) != repr(loaded[name]):
                changed.append(f"{name} {loaded[name]!r} (of this run: {own[name]!r})")
        if changed and not isinstance(scheduler, ScheduledLR):
            logger.warning(
                "%s goes on as in the checkpoint, with %s; to change that, use a schedule of "
                "trainkit.solver or replace trainer.scheduler after loading",
                type(scheduler).__name__,
                ", ".join(sorted(changed)),
            )


def _check_base_rates(scheduler: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError if a scheduler of torch has its base rates in another order.

    It has loaded them from a run whose groups had this order.
    """
    if isinstance(scheduler, ScheduledLR) or not hasattr(scheduler, "base_lrs"):
        return
    base_rates = [float(rate) for rate in scheduler.base_lrs]
    of_groups = [float(group.get("initial_lr", group["lr"])) for group in groups]
    if base_rates != of_groups and sorted(base_rates) == sorted(of_groups):
        raise ConfigError(
            "the parameter groups have another order than in the checkpoint, and "
            f"{type(scheduler).__name__} keeps its rates by their places: it has {base_rates}, "
            f"the groups have {of_groups}. Define the modules in their former order, or use a "
            "schedule of trainkit"
        )
