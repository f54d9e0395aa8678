"""Facts about a run, in its log and among its metrics."""

import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from trainkit.projects.solver_extras.names import group_names

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.engine.hooks.lr_scheduler import LRScheduler
from trainkit.utils import comm
from trainkit.utils.device import unwrap_model
from trainkit.utils.periods import check_period, exact, is_due

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class RuntimeInfo(HookBase):
    """Store ``epoch``, momentum and learning rates; at the start log the length, hardware and size of the run.

    If there are several parameter groups, ``lr/<name>`` is stored for each, under its name in the table at the start;
    if their momenta differ, ``momentum/<name>`` too. The log says to which group the plain ``lr`` belongs. The momentum
    of Adam is its first beta.

    Args:
        period: in iterations; use the period of the writers.
    """

    priority = 42  # early: the values of all later hooks belong to the epoch that it stores
    config_keys = (("period", "LOG.PERIOD"),)

    def __init__(self, period: int = 1) -> None:
        self._period = check_period("period", period, minimum=1)
        self._used: list[Any] = []

    def before_train(self) -> None:
        self._names = self._names_of_groups()
        logger.info("This run: %s", "; ".join(self._describe()))

    def before_step(self) -> None:
        if is_due(self.trainer, self._period, or_last=True) and hasattr(self.trainer, "optimizer"):
            groups = self.trainer.optimizer.param_groups  # the schedule changes their rates after the step
            self._used = [rate.clone() if isinstance(rate := group["lr"], Tensor) else rate for group in groups]

    def after_step(self) -> None:
        if is_due(self.trainer, self._period, or_last=True):
            if self.trainer.has_epochs:
                self.trainer.storage.put_scalar("epoch", self.trainer.epoch, smoothing_hint=False)
            if hasattr(self.trainer, "optimizer"):
                for name, value in self._of_optimizer().items():
                    self.trainer.storage.put_scalar(name, value, smoothing_hint=False)

    def _of_optimizer(self) -> dict[str, Any]:
        groups = self.trainer.optimizer.param_groups
        names = [*self._names, *map(str, range(len(self._names), len(groups)))]  # a hook may add groups
        momenta = [group.get("momentum", group.get("betas", (None,))[0]) for group in groups]
        used = zip(names, self._used, strict=False)  # a hook may add a group after the update
        found = {f"lr/{name}": lr for name, lr in used if len(groups) > 1}
        if any(momentum is not momenta[0] and momentum != momenta[0] for momentum in momenta):
            found |= {f"momentum/{name}": momentum for name, momentum in zip(names, momenta, strict=True)}
        elif all(getattr(hook, "param", None) != "momentum" for hook in self.trainer.hooks):  # that hook stores it
            found["momentum"] = momenta[0]
        return {name: value for name, value in found.items() if value is not None}

    def _names_of_groups(self) -> list[str]:
        """Those of the table at the start of a run; without a model, numbers."""
        groups, model = getattr(self.trainer, "optimizer", None), getattr(self.trainer, "model", None)
        if isinstance(model, nn.Module) and groups is not None:
            return group_names(groups.param_groups, unwrap_model(model))
        return []

    def _describe(self) -> Iterator[str]:
        trainer = self.trainer
        length = f"{trainer.max_iter} iterations"
        if trainer.has_epochs:
            per_epoch = exact(trainer.iters_per_epoch)
            length += f" = {float(trainer.max_iter / per_epoch):g} epochs of {float(per_epoch):g}"
        yield length
        yield f"world size {comm.get_world_size()}"
        if len(self._names) > 1:
            shown = LRScheduler.get_best_param_group_id(trainer.optimizer)
            yield f"lr is that of the parameter group {self._names[shown]!r}"
        cfg = getattr(trainer, "cfg", None)
        if cfg is not None:
            yield f"{cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.ACCUMULATION_STEPS} samples per iteration"
            yield "seed " + (str(cfg.SEED) if cfg.SEED >= 0 else "drawn at random")
        model = getattr(trainer, "model", None)
        if isinstance(model, nn.Module):
            total = sum(parameter.numel() for parameter in model.parameters())
            trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
            yield f"{trained:,} of {total:,} parameters trained"
