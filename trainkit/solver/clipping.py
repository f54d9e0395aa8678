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
    """Clips gradients in place, without waiting for the device; a gradient of which each rank holds a part as a whole.

    Args:
        clip_type: a ``GradientClipType`` or its value.
        norm_type: p of the p-norm, also ``inf``; for ``value`` it affects only the returned norm.

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

    @torch.no_grad()
    def __call__(self, parameters: Iterable[Tensor]) -> Tensor:
        """Clip the gradients of ``parameters``; parameters without a gradient are skipped.

        Returns:
            The norm of all gradients together before clipping, shape ``[]``, on the device of the gradients.
        """
        self.has_clipped = True
        groups = _by_mesh([parameter for parameter in parameters if parameter.grad is not None])
        norms = [_whole(get_total_norm(_gradients(group), self.norm_type)) for group in groups]
        total_norm = (
            norms[0]
            if len(norms) == 1
            else torch.linalg.vector_norm(torch.stack(norms), self.norm_type)
        )
        for group in groups if groups[0] else ():
            if self.clip_type is GradientClipType.FULL_MODEL:
                clip_grads_with_norm_(group, self.clip_value, total_norm)
            elif self.clip_type is GradientClipType.NORM:
                grads: list[Any] = [parameter.grad for parameter in group]
                # one all-reduce if ranks hold parts of the gradients
                norms_of_group = _whole(
                    torch.stack([torch.linalg.vector_norm(grad, self.norm_type) for grad in grads])
                )
                for grad, norm in zip(grads, norms_of_group, strict=True):
                    own = grad.to_local() if hasattr(grad, "to_local") else grad
                    own.mul_((self.clip_value / (norm + 1e-6)).clamp_(max=1.0))
            else:
                clip_grad_value_(group, self.clip_value)
        return total_norm


def _by_mesh(tensors: list[Tensor]) -> list[list[Tensor]]:
    """The tensors in groups that torch can process in one call: those that ranks divide in the same way, or not."""
    if not tensors or not hasattr(tensors[0], "device_mesh"):
        return [tensors]
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return [*groups.values()]


def _whole(norm: Any) -> Tensor:
    """The norm over all ranks that hold parts of the tensors, on every rank."""
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def clip_before_step(optimizer: Optimizer, clipper: GradientClipper) -> None:
    def clip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not clipper.has_clipped:
            # GradScaler.step sets it for a fused kernel
            if getattr(optimizer, "grad_scale", None) is not None:
                raise RuntimeError(
                    "gradients are still scaled; call scaler.unscale_(optimizer) before scaler.step()"
                )
            clipper(parameter for group in optimizer.param_groups for parameter in group["params"])
        clipper.has_clipped = False

    optimizer.register_step_pre_hook(clip)
    optimizer.gradient_clipper = clipper  # type: ignore[attr-defined]


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
