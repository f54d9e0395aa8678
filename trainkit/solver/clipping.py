"""Gradient clipping, as a function or inside an optimizer."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from trainkit.utils.periods import check_number


class GradientClipType(Enum):
    """What the clipper limits."""

    VALUE = "value"  # every element of a gradient
    NORM = "norm"  # the norm of each parameter's gradient
    FULL_MODEL = "full_model"  # the norm of all gradients together


@dataclass
class GradientClipper:
    """Clips gradients in place, without waiting for the device.

    If each rank holds a part of a gradient, it is clipped as a whole.

    Args:
        clip_type: a ``GradientClipType`` or its value.
        norm_type: p of the p-norm, also ``inf``; without effect for ``value``.

    Attributes:
        has_clipped: whether it was called since the last step of the optimizer that clips by it.
    """

    clip_type: GradientClipType | str
    clip_value: float
    norm_type: float = 2.0
    has_clipped: bool = field(default=False, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.clip_type = GradientClipType(self.clip_type)
        check_number("clip_value", self.clip_value, "(0, inf]")
        check_number("norm_type", self.norm_type, "(0, inf]")

    @property
    def gives_norm(self) -> bool:
        """Whether a call returns the norm; to clip values nobody needs it."""
        return self.clip_type is not GradientClipType.VALUE

    @torch.no_grad()
    def __call__(self, parameters: Iterable[Tensor]) -> Tensor | None:
        """Clip the gradients of ``parameters``; parameters without a gradient are skipped.

        Returns:
            The norm of all gradients together before clipping, shape ``[]``, on their device; None
            if values are clipped.
        """
        self.has_clipped = True
        with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
        if self.clip_type is GradientClipType.VALUE:
            if with_gradient:
                clip_grad_value_(with_gradient, self.clip_value)
            return None
        groups = _group_by_mesh(with_gradient)
        if self.clip_type is GradientClipType.NORM:
            return self._norm_of([self._clip_each(_gradients(group)) for group in groups])
        norms = [_over_ranks(get_total_norm(_gradients(group), self.norm_type)) for group in groups]
        total_norm = self._norm_of(norms)
        for group in groups:
            clip_grads_with_norm_(group, self.clip_value, total_norm)
        return total_norm

    def _norm_of(self, norms: list[Tensor]) -> Tensor:
        if not norms:
            return torch.zeros(())
        if len(norms) == 1:
            return norms[0]
        on_one_device = [norm.to(norms[0].device) for norm in norms]
        return torch.linalg.vector_norm(torch.stack(on_one_device), self.norm_type)

    def _clip_each(self, grads: list[Any]) -> Tensor:
        """Limit the norm of each of these gradients; returns the norm of all before that."""
        norms = _over_ranks(torch.stack(torch._foreach_norm(grads, self.norm_type)))
        factors = (self.clip_value / (norms + 1e-6)).clamp_(max=1.0)
        own_parts = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
        torch._foreach_mul_(own_parts, factors.unbind())
        return torch.linalg.vector_norm(norms, self.norm_type)


_WHOLE = frozenset([Tensor, torch.nn.Parameter])
"""The types of tensors that are not divided over ranks; compared exactly."""


def _group_by_mesh(tensors: list[Tensor]) -> list[list[Tensor]]:
    """The tensors in groups that torch can process in one call.

    The tensors of a group are on one device, and divided over ranks in the same way or not at all.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) == 1 and _WHOLE.issuperset(map(type, tensors)):
        return [tensors]
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        mesh = None if type(tensor) in _WHOLE else getattr(tensor, "device_mesh", None)
        groups.setdefault((tensor.device, mesh), []).append(tensor)
    return [*groups.values()]


def _over_ranks(norm: Any) -> Tensor:
    """A norm, or several, over all ranks that hold parts of the tensors; on every rank."""
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def clip_before_step(optimizer: Optimizer, clipper: GradientClipper) -> None:
    """Let ``step()`` clip first, unless a trainer has called the clipper for this step."""

    def clip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not clipper.has_clipped:
            # GradScaler.step sets it for a fused kernel
            if getattr(optimizer, "grad_scale", None) is not None:
                raise RuntimeError(
                    "gradients are still scaled; call scaler.unscale_(optimizer) before "
                    "scaler.step()"
                )
            parameters: list[Tensor] = []
            for group in optimizer.param_groups:
                parameters.extend(group["params"])
            clipper(parameters)
        clipper.has_clipped = False

    optimizer.register_step_pre_hook(clip)
    optimizer.gradient_clipper = clipper  # type: ignore[attr-defined]


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
