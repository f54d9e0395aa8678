"""Policies for values that are not finite which flag each update on the device."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.engine.defaults.build import POLICY_REGISTRY
from trainkit.engine.finite import describe_failure
from trainkit.engine.losses import Losses
from trainkit.engine.policies import SKIP_FLAG, NonFinitePolicy, skips_on_device
from trainkit.engine.step import parameters_of
from trainkit.solver.param_groups import start_momentum
from trainkit.utils import comm
from trainkit.utils.events import EventStorage

__all__ = ["CheckGradients", "SkipNonFinite"]

_FLAG = "[flag]gradients"


class CheckGradients(NonFinitePolicy):
    """Every gradient is checked before each update, and one that is not finite ends the run.

    On a CPU in one process the weights are then those of before the step.
    """

    name = "gradients"

    def see_gradients(self, optimizer: Any, model: nn.Module, losses: Losses) -> dict[str, Tensor]:
        parameters = parameters_of(optimizer, model)
        flag = torch.zeros((), dtype=torch.float32, device=losses.total.device)
        _set_if_not_finite(self._checked(parameters, losses), flag)
        if comm.get_data_group_size() > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return {_FLAG: flag}

    def _checked(self, parameters: list[Tensor], losses: Losses) -> list[Tensor]:
        """The tensors that must be finite."""
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def judge_numbers(
        self, storage: EventStorage, iter: int, values: dict[str, Any], gather_period: int
    ) -> str | None:
        is_bad = values.pop(_FLAG, 0.0) and not values.get(SKIP_FLAG)
        failure = super().judge_numbers(storage, iter, values, gather_period)
        if is_bad and failure is None:
            return describe_failure("gradients are", iter, values)
        return failure


class SkipNonFinite(CheckGradients):
    """If the loss or a gradient is not finite, the update and the step's changes of buffers are left out on all ranks.

    The number of such updates is stored as ``skipped_updates``. Only optimizers that are not fused wait for the device
    to learn whether to update.
    """

    name = "skip"

    def __init__(self, max_in_row: int = 25) -> None:
        super().__init__(max_in_row)
        self._former_buffers: dict[str, Tensor] = {}
        # None: a gradient scaler leaves out the update
        self._skip_flag: Tensor | None = None

    def bind(self, optimizer: Any) -> None:
        """Raises ConfigError: fused SGD with dampening."""
        if skips_on_device(optimizer):
            start_momentum(optimizer)

    def before_gradients(self, model: nn.Module) -> None:
        self._former_buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def _checked(self, parameters: list[Tensor], losses: Losses) -> list[Tensor]:
        return [*super()._checked(parameters, losses), losses.total]

    def judge(self, extra: dict[str, Tensor], model: nn.Module) -> None:
        flag = extra.pop(_FLAG)
        by_scaler = extra.get(SKIP_FLAG)
        if by_scaler is not None:
            # the scaler skips the update itself, if its own tensor says so
            flag = by_scaler.add_(flag).clamp_(max=1.0)
        if comm.get_world_size() > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        self._restore_buffers(model, flag)
        self._skip_flag = None if by_scaler is not None else flag
        extra[SKIP_FLAG] = flag

    def _restore_buffers(self, model: nn.Module, flag: Tensor) -> None:
        """Undo the step's changes of buffers, if the flag is set."""
        if not self._former_buffers:
            return
        for name, buffer in model.named_buffers():
            former = self._former_buffers.get(name)
            if former is not None:  # else this forward pass has created the buffer
                is_skipped = flag.bool().to(buffer.device)
                torch.where(is_skipped, former, buffer, out=buffer)
        self._former_buffers = {}

    def update(self, optimizer: Any) -> None:
        flag = self._skip_flag
        if flag is None:
            optimizer.step()
        elif not skips_on_device(optimizer):
            is_skipped = flag.item()
            if not is_skipped:
                optimizer.step()
        else:
            # as GradScaler does
            optimizer.grad_scale = None
            optimizer.found_inf = flag
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf


@POLICY_REGISTRY.register()
def gradients(max_in_row: int) -> CheckGradients:
    return CheckGradients(max_in_row)


@POLICY_REGISTRY.register()
def skip(max_in_row: int) -> SkipNonFinite:
    return SkipNonFinite(max_in_row)


def _set_if_not_finite(tensors: Iterable[Tensor], flag: Tensor) -> None:
    """Set ``flag``, float32 of shape ``[]``, to 1 if a value is not finite; one kernel for all of a device and kind."""
    groups: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor in tensors:
        plain = _plain(tensor)
        kind = plain.device, plain.dtype, type(plain)
        groups.setdefault(kind, []).append(plain)
    for (device, _, _), group in groups.items():
        here = flag
        if device != flag.device:
            here = torch.zeros_like(flag, device=device)
        # the kernel of GradScaler.unscale_; a scale of 1 does not change the values
        scale = torch.ones_like(here)
        torch._amp_foreach_non_finite_check_and_unscale_(group, here, scale)
        if here is not flag:
            flag.copy_(torch.maximum(flag, here.to(flag.device, non_blocking=True)))


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()  # a gradient may have a graph
    if tensor.is_sparse:
        tensor = tensor._values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor
