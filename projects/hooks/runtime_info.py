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
    """Store ``epoch``, momentum and learning rates; at the start log the length and size of the run.

    If there are several parameter groups, ``lr/<name>`` is stored for each, under its name in the table at the start.
    The momentum is that of the first group; that of Adam is its first beta. Use the ``period`` of the writers.
    """

    priority = 42  # early: the values of all later hooks belong to the epoch that it stores
    config_keys = (("period", "LOG.PERIOD"),)

    def __init__(self, period: int = 1) -> None:
        self._period = check_period("period", period, minimum=1)

    def before_train(self) -> None:
        model, groups = getattr(self.trainer, "model", None), self._groups()
        self._names = group_names(groups, unwrap_model(model)) if groups and isinstance(model, nn.Module) else []
        logger.info("This run: %s", "; ".join(self._describe(model)))

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = getattr(self.trainer, "optimizer", None)
        return [] if optimizer is None else optimizer.param_groups

    def before_step(self) -> None:
        if is_due(self.trainer, self._period, or_last=True):  # the schedule changes the rates after the step
            rates = [group["lr"] for group in self._groups()]
            self._used = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def after_step(self) -> None:
        if not is_due(self.trainer, self._period, or_last=True):
            return
        names = [*self._names, *map(str, range(len(self._names), len(self._used)))]  # a hook may add groups
        found = {f"lr/{name}": lr for name, lr in zip(names, self._used, strict=True) if len(names) > 1}
        if self.trainer.has_epochs:
            found = {"epoch": self.trainer.epoch, **found}
        for group in self._groups()[:1]:
            momentum = group.get("momentum", group.get("betas", (None,))[0])
            if momentum is not None and all(getattr(hook, "param", "") != "momentum" for hook in self.trainer.hooks):
                found["momentum"] = momentum
        for name, value in found.items():
            self.trainer.storage.put_scalar(name, value, smoothing_hint=False)

    def _describe(self, model: Any) -> Iterator[str]:
        trainer, cfg = self.trainer, getattr(self.trainer, "cfg", None)
        length = f"{trainer.max_iter} iterations"
        if trainer.has_epochs:
            per_epoch = exact(trainer.iters_per_epoch)
            length += f" = {float(trainer.max_iter / per_epoch):g} epochs of {float(per_epoch):g}"
        yield length
        yield f"world size {comm.get_world_size()}"
        if len(self._names) > 1:
            shown = LRScheduler.get_best_param_group_id(trainer.optimizer)
            yield f"lr is that of the parameter group {self._names[shown]!r}"
        if cfg is not None:
            yield f"{cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.ACCUMULATION_STEPS} samples per iteration"
            yield "seed " + (str(cfg.SEED) if cfg.SEED >= 0 else "drawn at random")
        if isinstance(model, nn.Module):
            sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
            trained, total = sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)
            yield f"{trained:,} of {total:,} parameters trained"
