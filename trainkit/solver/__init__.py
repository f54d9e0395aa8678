"""Optimizers, parameter groups, gradient clipping and learning rate schedules."""

from trainkit.solver.build import OPTIMIZER_REGISTRY, build_lr_scheduler, build_optimizer
from trainkit.solver.clipping import (
    GradientClipper,
    GradientClipType,
    build_gradient_clipper,
    maybe_add_gradient_clipping,
)
from trainkit.solver.lr_scheduler import KeepLastValue, LRMultiplier, WarmupParamScheduler
from trainkit.solver.param_groups import get_default_optimizer_params, reduce_param_groups

__all__ = [
    "OPTIMIZER_REGISTRY",
    "build_optimizer",
    "get_default_optimizer_params",
    "reduce_param_groups",
    "GradientClipType",
    "GradientClipper",
    "build_gradient_clipper",
    "maybe_add_gradient_clipping",
    "build_lr_scheduler",
    "KeepLastValue",
    "LRMultiplier",
    "WarmupParamScheduler",
]
