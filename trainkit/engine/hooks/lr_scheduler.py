"""The hook that sets the learning rate."""

import logging
from collections import Counter
from typing import Any

import torch
from fvcore.common.param_scheduler import ParamScheduler
from torch.optim.lr_scheduler import LRScheduler as TorchLRScheduler

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.solver.lr_scheduler import LRMultiplier, ScheduledLR

logger = logging.getLogger(__name__)

_PROGRESS = {"last_epoch", "base_lrs"}  # of a scheduler's state; the optimizer has the rates


@HOOK_REGISTRY.register()
class LRScheduler(HookBase):
    """Step a schedule after each iteration, and store the ``lr`` that the iteration used.

    The ``lr`` is that of the largest parameter group; if each group has one parameter, the most common one.

    Args:
        optimizer: default is ``trainer.optimizer``.
        scheduler: a torch scheduler, stepped once per iteration; or an fvcore ``ParamScheduler``, a factor of the base
            learning rate over the whole run, which keeps its last value at the end. Default is ``trainer.scheduler``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: TorchLRScheduler | ParamScheduler | None = None,
    ) -> None:
        self._given_optimizer, self._given_scheduler = optimizer, scheduler
        self._scheduler: TorchLRScheduler | None = None  # of the current or last run

    def before_train(self) -> None:
        """Raises ValueError if the schedule belongs to another optimizer."""
        self._optimizer = self._given_optimizer or self.trainer.optimizer
        groups, iter = self._optimizer.param_groups, self.trainer.next_iter_of(self)
        scheduler = self._given_scheduler or self.trainer.scheduler
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(
                "ReduceLROnPlateau needs a metric; use the hook ReduceOnPlateau, not LRScheduler with it"
            )
        if isinstance(
            scheduler, ParamScheduler
        ):  # a function of the iteration, which has no state to load
            scheduler = LRMultiplier(
                self._optimizer, scheduler, self.trainer.max_iter, last_iter=iter - 1
            )
        # compare the groups, not the optimizers: an optimizer may be wrapped
        if getattr(scheduler, "optimizer", self._optimizer).param_groups is not groups:
            raise ValueError(
                "LRScheduler has a scheduler that changes the learning rates of another optimizer"
            )
        if isinstance(scheduler, ScheduledLR):
            if scheduler.last_epoch != iter:
                scheduler.seek(iter)  # this may be a second run
            else:
                scheduler.refresh()  # a resumed run may have another schedule than its checkpoint
        self._scheduler = scheduler
        self._best_param_group_id = self.get_best_param_group_id(self._optimizer)
        if len(groups) > 1:
            logger.info(
                "The lr shown is that of parameter group %d of %d",
                self._best_param_group_id + 1,
                len(groups),
            )

    def after_step(self) -> None:
        lr = self._optimizer.param_groups[self._best_param_group_id]["lr"]
        self.trainer.storage.put_scalar("lr", lr, smoothing_hint=False)
        self._scheduler.step()  # type: ignore[union-attr]

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
        return rates.index(Counter(rates).most_common(1)[0][0])

    def _stateful(self) -> TorchLRScheduler | None:
        """The torch scheduler; None for a ``ParamScheduler``, which is a function of the iteration."""
        scheduler = self._given_scheduler or getattr(self.trainer, "scheduler", None)
        return scheduler if isinstance(scheduler, TorchLRScheduler) else None

    def state_dict(self) -> dict[str, Any]:
        scheduler = self._stateful()
        return {} if scheduler is None else scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the scheduler; does nothing during a run.

        A scheduler of torch takes its lengths from the state too; those that differ are logged.
        """
        scheduler = self._stateful()
        if scheduler is None or (self.trainer is not None and self.trainer.status == "running"):
            return
        own = scheduler.state_dict()
        scheduler.load_state_dict(state_dict)
        loaded = scheduler.state_dict()
        changed = [
            f"{name} {loaded[name]!r} (of this run: {own[name]!r})"
            for name in own.keys() & loaded.keys() - _PROGRESS
            if not name.startswith("_") and repr(own[name]) != repr(loaded[name])
        ]
        if changed and not isinstance(scheduler, ScheduledLR):
            logger.warning(
                "%s goes on as in the checkpoint, with %s; to change that, use a schedule of "
                "trainkit.solver or replace trainer.scheduler after loading",
                type(scheduler).__name__,
                ", ".join(sorted(changed)),
            )
