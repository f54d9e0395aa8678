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
        if not is_due(self.trainer, self._interval):
            return
        losses = self.trainer.losses
        # a user's run_step may set only ``losses``
        names = getattr(self.trainer, "trained_losses", losses)
        by_rank = comm.all_gather({name: losses[name].item() for name in names})
        for of_rank in by_rank:
            if not all(math.isfinite(value) for value in of_rank.values()):
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
        if not is_due(self.trainer, self._period, or_last=True):
            return
        optimizer = getattr(self.trainer, "optimizer", None)
        parameters = parameters_of(optimizer, self.trainer.model)
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if hasattr(norm, "full_tensor"):  # of a sharded model
            norm = norm.full_tensor()
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
        is_first = self.trainer.iter == self.trainer.start_iter
        if not is_first and not is_due(self.trainer, self._period):
            return
        unused = []
        for name, param in unwrap_model(self.trainer.model).named_parameters():
            if param.requires_grad and param.grad is None:
                unused.append(name)
        found = ", ".join(unused)
        if found and found != self._last_found:
            text = "Parameters without a gradient in iteration %d (counted from 0): %s; remove or freeze them"
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
        targets = []
        wrong = []
        for pattern in self._names:
            fitting = fnmatch.filter(trainable, pattern)
            if not fitting:
                wrong.append(pattern)
            targets += [trainable[name] for name in fitting]
        if wrong:
            raise ConfigError(f"names of Freeze has {wrong}; trainable are: {', '.join(trainable)}")
        self._targets = targets
        # these wrappers decide in their constructors which parameters get gradients
        is_wrapped = model is not self.trainer.model
        is_sharded = hasattr(model, "set_requires_gradient_sync")
        self._removes_gradients = is_wrapped or is_sharded

    def _is_active(self) -> bool:
        iter = self.trainer.iter
        return self._begin <= iter and (self._end is None or iter < self._end)

    def before_step(self) -> None:
        may_change_in = (self.trainer.start_iter, self._begin, self._end)
        if not self._removes_gradients and self.trainer.iter in may_change_in:
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
                "factors must be a list of [iteration, factor], such as [[1000, 4]], got "
                f"{factors!r}"
            )
        self._factors: list[tuple[int, int]] = []
        for at, to in factors:
            iteration = check_period("iteration", at)
            factor = check_period("factor", to, minimum=1)
            self._factors.append((iteration, factor))
        if self._factors != sorted(dict(self._factors).items()):
            raise ValueError(f"the iterations of factors must grow, got {factors!r}")

    def before_train(self) -> None:
        self._first = self._first or self.trainer.accumulation_steps

    def before_step(self) -> None:
        present = 1
        for iteration, factor in self._factors:
            if iteration <= self.trainer.iter:
                present = factor
        self.trainer.accumulation_steps = self._first * present
