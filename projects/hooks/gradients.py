"""Hooks on the losses and gradients of a step: checks, the norm, frozen parameters, accumulation."""

import fnmatch
import logging
import math
from collections.abc import Sequence

import torch
from torch.nn import Parameter

from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase, Priority
from trainkit.engine.step import parameters_of
from trainkit.utils import comm
from trainkit.utils.device import unwrap_model
from trainkit.utils.periods import check_period, is_due

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class CheckFiniteLoss(HookBase):
    """Every ``interval``-th iteration, before the update, raise FloatingPointError if a loss of any rank is not finite.

    The trainers check every iteration themselves, but with asynchronous metrics their error comes up to one log period
    later. This hook waits for the device and the other ranks. It ignores entries that are only logged.
    """

    def __init__(self, interval: int = 50) -> None:
        self._interval = check_period("interval", interval, minimum=1)

    def after_backward(self) -> None:
        if is_due(self.trainer, self._interval):
            losses = self.trainer.losses
            # a user's run_step may set only ``losses``
            names = getattr(self.trainer, "trained_losses", losses)
            by_rank = comm.all_gather({name: losses[name].item() for name in names})
            if not all(math.isfinite(value) for found in by_rank for value in found.values()):
                raise FloatingPointError(
                    f"in iteration {self.trainer.iter}, before the update, by rank: {by_rank}"
                )


@HOOK_REGISTRY.register()
class GradNorm(HookBase):
    """Store ``grad_norm``, the 2-norm of the gradients of all parameters of the optimizer, every ``period`` iterations.

    Clipping by a norm (SOLVER.CLIP_GRADIENTS) stores it in each iteration, so this hook is then an error.
    """

    config_keys = (("period", "LOG.PERIOD"),)

    def __init__(self, period: int = 20) -> None:
        self._period = check_period("period", period, minimum=1)

    def before_train(self) -> None:
        clipper = getattr(self.trainer, "clip_gradients", None)
        if clipper is not None and getattr(clipper, "gives_norm", True):
            raise ConfigError("SOLVER.CLIP_GRADIENTS stores grad_norm already; leave GradNorm out")

    def after_backward(self) -> None:
        if is_due(self.trainer, self._period, or_last=True):
            parameters = parameters_of(getattr(self.trainer, "optimizer", None), self.trainer.model)
            grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            # of a sharded model
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            self.trainer.storage.put_scalar("grad_norm", norm)


@HOOK_REGISTRY.register()
class UnusedParameters(HookBase):
    """Name the trainable parameters without a gradient: the loss does not depend on them.

    DistributedDataParallel would fail because of them in the next forward pass. The first iteration of a run and every
    ``period``-th are checked, on each rank; the same names are logged only once. The optimizer must set gradients to
    None, as it does by default.
    """

    def __init__(self, period: int = 1) -> None:
        self._period = check_period("period", period)

    def before_train(self) -> None:
        self._last_found = ""

    def after_backward(self) -> None:
        if self.trainer.iter == self.trainer.start_iter or is_due(self.trainer, self._period):
            named = unwrap_model(self.trainer.model).named_parameters()
            found = ", ".join(
                name for name, param in named if param.requires_grad and param.grad is None
            )
            if found and found != self._last_found:
                text = "Parameters without a gradient in iteration %d: %s; remove or freeze them"
                logger.error(text, self.trainer.iter, found)
            self._last_found = found


@HOOK_REGISTRY.register()
class Freeze(HookBase):
    """Do not train the parameters with certain names in iterations ``begin <= iter < end``; None: until the end.

    A frozen parameter gets no gradient, so weight decay and momentum do not change it either. The statistics of batch
    norm layers still change. In a model inside DistributedDataParallel or ``fully_shard`` the gradients are computed
    and then removed, which saves no time. ``names`` are patterns such as ``backbone.*``, or one; each must fit a
    trainable parameter.
    """

    _targets: Sequence[Parameter] = ()

    def __init__(self, names: str | list[str], begin: int = 0, end: int | None = None) -> None:
        self._names = [names] if isinstance(names, str) else list(names)
        self._begin = check_period("begin", begin)
        self._end = end if end is None else check_period("end", end, minimum=begin + 1)

    def before_train(self) -> None:
        model = unwrap_model(self.trainer.model)
        trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
        if wrong := [pattern for pattern in self._names if not fnmatch.filter(trainable, pattern)]:
            raise ConfigError(f"names of Freeze has {wrong}; trainable are: {', '.join(trainable)}")
        self._targets = [
            trainable[name]
            for pattern in self._names
            for name in fnmatch.filter(trainable, pattern)
        ]
        # these wrappers decide in their constructors which parameters get gradients
        self._removes_gradients = model is not self.trainer.model or hasattr(
            model, "set_requires_gradient_sync"
        )

    def _is_active(self) -> bool:
        return self._begin <= self.trainer.iter and (
            self._end is None or self.trainer.iter < self._end
        )

    def before_step(self) -> None:
        if not self._removes_gradients and self.trainer.iter in (
            self.trainer.start_iter,
            self._begin,
            self._end,
        ):
            self._train_targets(not self._is_active())

    def after_backward(self) -> None:
        if self._removes_gradients and self._is_active():
            for param in self._targets:
                param.grad = None

    def after_train(self) -> None:
        self._train_targets(True)

    def _train_targets(self, trains: bool) -> None:
        for param in self._targets:
            param.requires_grad_(trains)
            if not trains:
                param.grad = None


@HOOK_REGISTRY.register()
class AccumulationSchedule(HookBase):
    """From each iteration of ``factors`` on, draw so many times the trainer's first number of micro-batches.

    In a config: ``{NAME: AccumulationSchedule, FACTORS: [[1000, 4], [5000, 16]]}``. Epochs are those of the first
    number, so give lengths in iterations.
    """

    priority = Priority.HIGHEST
    _first = 0
    config_keys = (("factors", "SOLVER.ACCUMULATION_FACTORS"),)

    def __init__(self, factors: Sequence[Sequence[int]]) -> None:
        if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in factors):
            raise ValueError(
                f"factors must be a list of [iteration, factor], such as [[1000, 4]], got {factors!r}"
            )
        self._factors = [
            (check_period("iteration", at), check_period("factor", to, minimum=1))
            for at, to in factors
        ]
        if self._factors != sorted(dict(self._factors).items()):
            raise ValueError(f"the iterations of factors must grow, got {factors!r}")

    def before_train(self) -> None:
        self._first = self._first or self.trainer.accumulation_steps

    def before_step(self) -> None:
        factor = next(
            (factor for at, factor in reversed(self._factors) if at <= self.trainer.iter), 1
        )
        self.trainer.accumulation_steps = self._first * factor
