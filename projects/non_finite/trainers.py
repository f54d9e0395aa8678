"""Policies for values that are not finite: parts of a trainer that flag each update on the device."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.engine.amp import SKIP_FLAG, SkippingTrainer, skips_on_device
from trainkit.engine.build import POLICY_REGISTRY
from trainkit.engine.losses import Losses, describe_failure
from trainkit.engine.step import SimpleTrainer, parameters_of
from trainkit.solver.param_groups import start_momentum
from trainkit.utils import comm

__all__ = ["CheckGradients", "SkipNonFinite"]

_FLAG = "[flag]gradients"


class CheckGradients(SimpleTrainer):
    """Every gradient is checked before each update, and one that is not finite ends the run.

    On a CPU in one process the weights are then those of before the step. Use it before the trainer that it extends:
    ``class MyTrainer(CheckGradients, AMPTrainer)``.
    """

    def judge_gradients(self, losses: Losses) -> dict[str, Tensor]:
        flag = torch.zeros((), dtype=torch.float32, device=losses.total.device)
        _set_if_not_finite(self._checked(losses), flag)
        if comm.get_data_group_size() > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return {**super().judge_gradients(losses), _FLAG: flag}

    def _checked(self, losses: Losses) -> list[Tensor]:
        """The tensors that must be finite."""
        grads = (parameter.grad for parameter in parameters_of(self.optimizer, self.model))
        return [grad for grad in grads if grad is not None]

    def look(self, iter: int, values: dict[str, Any]) -> str | None:
        is_bad = values.pop(_FLAG, 0.0) and not values.get(SKIP_FLAG)
        failure = super().look(iter, values)
        return (
            describe_failure("gradients are", iter, values)
            if is_bad and failure is None
            else failure
        )


class SkipNonFinite(CheckGradients, SkippingTrainer):
    """If the loss or a gradient is not finite, the update and the step's changes of buffers are left out on all ranks.

    The number of such updates is stored as ``skipped_updates``. Only optimizers that are not fused wait for the device
    to learn whether to update.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError: fused SGD with dampening."""
        super().__init__(*args, **kwargs)
        self._former_buffers: dict[str, Tensor] = {}
        if skips_on_device(self.optimizer):
            start_momentum(self.optimizer)

    def compute_gradients(self) -> Losses:
        self._former_buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        return super().compute_gradients()

    def _checked(self, losses: Losses) -> list[Tensor]:
        return [*super()._checked(losses), losses.total]

    def judge_gradients(self, losses: Losses) -> dict[str, Tensor]:
        extra = super().judge_gradients(losses)
        flag = extra.pop(_FLAG)
        by_scaler = extra.get(SKIP_FLAG)  # it skips the update itself, if its own tensor says so
        if by_scaler is not None:
            flag = by_scaler.add_(flag).clamp_(max=1.0)
        if comm.get_world_size() > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        for name, buffer in self.model.named_buffers() if self._former_buffers else ():
            if name in self._former_buffers:  # False: this forward pass has created the buffer
                torch.where(
                    flag.bool().to(buffer.device), self._former_buffers[name], buffer, out=buffer
                )
        self._former_buffers = {}
        self._skip_flag = None if by_scaler is not None else flag
        return {**extra, SKIP_FLAG: flag}

    def update(self) -> None:
        flag = self._skip_flag
        if flag is None:
            super().update()
        elif not skips_on_device(self.optimizer):
            if not flag.item():
                super().update()
        else:
            optimizer: Any = self.optimizer
            optimizer.grad_scale, optimizer.found_inf = None, flag  # as GradScaler does
            try:
                super().update()
            finally:
                del optimizer.grad_scale, optimizer.found_inf


@POLICY_REGISTRY.register()
def gradients() -> type[CheckGradients]:
    return CheckGradients


@POLICY_REGISTRY.register()
def skip() -> type[SkipNonFinite]:
    return SkipNonFinite


def _set_if_not_finite(tensors: Iterable[Tensor], flag: Tensor) -> None:
    """Set ``flag``, float32 of shape ``[]``, to 1 if a value is not finite; one kernel for all of a device and kind."""
    groups: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor in map(_plain, tensors):
        groups.setdefault((tensor.device, tensor.dtype, type(tensor)), []).append(tensor)
    for (device, *_), group in groups.items():
        here = flag if device == flag.device else torch.zeros_like(flag, device=device)
        # the kernel of GradScaler.unscale_; a scale of 1 does not change the values
        torch._amp_foreach_non_finite_check_and_unscale_(group, here, torch.ones_like(here))
        if here is not flag:
            flag.copy_(torch.maximum(flag, here.to(flag.device, non_blocking=True)))


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()  # a gradient may have a graph
    if tensor.is_sparse:
        tensor = tensor._values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
