"""Gradient clipping, as a function or inside an optimizer."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from trainkit.config.config import CfgNode
from trainkit.config.errors import ConfigError
from trainkit.utils.numbers import is_number
from trainkit.utils.parts import by_mesh, whole

_OptimizerT = TypeVar("_OptimizerT", bound=Optimizer)
_CLIPPED_BY = "_gradients_are_clipped_by"


class GradientClipType(Enum):
    """What the clipper limits."""

    VALUE = "value"  # every element of a gradient
    NORM = "norm"  # the norm of each parameter's gradient
    FULL_MODEL = "full_model"  # the norm of all gradients together


@dataclass(frozen=True)
class GradientClipper:
    """Clip gradients in place, without waiting for the device.

    A gradient of which each rank holds a part is clipped as a whole.

    Clippers with the same arguments are equal.

    Args:
        clip_type: a ``GradientClipType`` or its value.
        norm_type: p of the p-norm, also ``inf``; for ``value`` it affects only the returned norm.

    Raises:
        ValueError: ``clip_type`` is unknown, or ``clip_value`` or ``norm_type`` is not greater than 0.
    """

    clip_type: GradientClipType | str
    clip_value: float
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        accepted = {kind.value: kind for kind in GradientClipType} | {kind: kind for kind in GradientClipType}
        if self.clip_type not in accepted:
            raise ValueError(
                "clip_type (SOLVER.CLIP_GRADIENTS.CLIP_TYPE) must be one of "
                f"{', '.join(kind.value for kind in GradientClipType)}, got {self.clip_type!r}"
            )
        object.__setattr__(self, "clip_type", accepted[self.clip_type])
        for name in ("clip_value", "norm_type"):
            value = getattr(self, name)
            if not is_number(value) or not value > 0:
                raise ValueError(
                    f"{name} (SOLVER.CLIP_GRADIENTS.{name.upper()}) must be a number greater than 0, got {value!r}"
                )

    @torch.no_grad()
    def __call__(self, parameters: Iterable[Tensor]) -> Tensor:
        """Clip the gradients of ``parameters``; parameters without a gradient are skipped.

        Returns:
            The norm of all gradients together before clipping, shape ``[]``, on the device of the gradients.
        """
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        grads = [cast(Tensor, parameter.grad) for parameter in parameters]
        norms = [whole(get_total_norm(group, self.norm_type)) for group in by_mesh(grads)]
        total_norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), self.norm_type)
        if self.clip_type is GradientClipType.FULL_MODEL:
            for group in by_mesh(parameters):
                clip_grads_with_norm_(group, self.clip_value, total_norm)
        elif self.clip_type is GradientClipType.NORM:
            # clip_grad_norm_([parameter]) for each parameter takes more than twice the time (318 on a CPU: 20 ms).
            for grad in grads:
                norm = torch.linalg.vector_norm(grad, self.norm_type)
                grad.mul_((self.clip_value / (norm + 1e-6)).clamp_(max=1.0))
        elif grads:  # torch fails without any gradient
            clip_grad_value_(parameters, self.clip_value)
        return total_norm


def build_gradient_clipper(cfg: CfgNode) -> GradientClipper | None:
    """The clipper of ``SOLVER.CLIP_GRADIENTS``; None if clipping is off.

    Raises:
        ConfigError: a value is not accepted; see ``GradientClipper``.
    """
    clip = cfg.SOLVER.CLIP_GRADIENTS
    try:
        return GradientClipper(clip.CLIP_TYPE, clip.CLIP_VALUE, clip.NORM_TYPE) if clip.ENABLED else None
    except ValueError as error:
        raise ConfigError(str(error)) from error


@overload
def maybe_add_gradient_clipping(cfg: CfgNode, optimizer: type[_OptimizerT]) -> type[_OptimizerT]: ...
@overload
def maybe_add_gradient_clipping(cfg: CfgNode, optimizer: _OptimizerT) -> _OptimizerT: ...
def maybe_add_gradient_clipping(cfg: CfgNode, optimizer: Any) -> Any:
    """Let an optimizer clip by ``SOLVER.CLIP_GRADIENTS`` at the start of each step; `build_optimizer` calls this.

    A trainer that has already clipped by the same rule uses `already_clipped`. With a ``GradScaler`` and a fused
    optimizer, call ``scaler.unscale_(optimizer)`` before ``scaler.step(optimizer)``; otherwise gradients are still
    scaled, and the step raises RuntimeError. Gradients that a closure computes during the step are not clipped.

    Args:
        optimizer: an instance or a class.

    Returns:
        The same instance, or a subclass of the class, with the rule as ``gradient_clipper``. It is unchanged if it has
        the same rule already or clipping is off.

    Raises:
        ConfigError: a value is not accepted; see ``GradientClipper``.
        TypeError: ``optimizer`` is neither an instance nor a subclass of ``torch.optim.Optimizer``.
    """
    is_class = isinstance(optimizer, type) and issubclass(optimizer, Optimizer)
    if not is_class and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or a subclass of it, got {optimizer!r}")
    clipper = build_gradient_clipper(cfg)
    if clipper is None or getattr(optimizer, "gradient_clipper", None) == clipper:
        return optimizer
    if is_class:
        return _clipping_subclass(optimizer, clipper)
    _clip_before_step(optimizer, clipper)
    return optimizer


def _clipping_subclass(optimizer_class: type[Optimizer], clipper: GradientClipper) -> type[Optimizer]:
    class Clipping(optimizer_class):  # type: ignore[misc, valid-type]
        gradient_clipper = clipper

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            _clip_before_step(self, clipper)

    Clipping.__name__ = Clipping.__qualname__ = f"{optimizer_class.__name__}WithGradientClip"
    return Clipping


def _clip_before_step(optimizer: Optimizer, clipper: GradientClipper) -> None:
    def clip(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(optimizer, _CLIPPED_BY, None) == clipper:
            return
        # GradScaler.step sets this attribute on an optimizer whose fused kernel unscales
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                f"the gradients of this fused {type(optimizer).__name__} are still scaled, so clipping them would be "
                "wrong; call scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        clipper(parameter for group in optimizer.param_groups for parameter in group["params"])

    def reduce(protocol: object) -> tuple[Any, ...]:  # torch's own state has no clipper, and so a copy would not clip
        return _restore, (type(optimizer), optimizer.__getstate__(), clipper)

    optimizer.register_step_pre_hook(clip)
    optimizer.gradient_clipper = clipper  # type: ignore[attr-defined]
    optimizer.__reduce_ex__ = reduce  # type: ignore[method-assign]


def _restore(optimizer_class: type[Optimizer], state: dict[str, Any], clipper: GradientClipper) -> Optimizer:
    optimizer = optimizer_class.__new__(optimizer_class)
    optimizer.__setstate__(state)
    _clip_before_step(optimizer, clipper)
    return optimizer


def already_clipped(optimizer: Any, clipper: Any) -> AbstractContextManager[None]:
    """Context in which the optimizer does not clip by the rule of ``clipper``: the trainer has clipped already."""
    if clipper is None or getattr(optimizer, "gradient_clipper", None) != clipper:
        return nullcontext()  # the usual case, in each step
    return _without_clipping(optimizer, clipper)


@contextmanager
def _without_clipping(optimizer: Any, clipper: Any) -> Iterator[None]:
    setattr(optimizer, _CLIPPED_BY, clipper)
    try:
        yield
    finally:
        delattr(optimizer, _CLIPPED_BY)
