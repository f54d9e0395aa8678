"""Optimizers, parameter groups, gradient clipping and learning rate schedules."""

from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LRScheduler as LRScheduler  # from here too, as in detectron2

from trainkit.utils.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit.solver import schedules
    from trainkit.solver.build import (
        OPTIMIZER_BUILDER_REGISTRY,
        OPTIMIZER_REGISTRY,
        PARAM_GROUP_REGISTRY,
        build_lr_scheduler,
        build_optimizer,
    )
    from trainkit.solver.clipping import (
        GradientClipper,
        GradientClipType,
        build_gradient_clipper,
        maybe_add_gradient_clipping,
    )
    from trainkit.solver.composed import build_schedule
    from trainkit.solver.lr_scheduler import (
        KeepLastValue,
        LRFunction,
        LRMultiplier,
        ScheduledLR,
        WarmupCosineLR,
        WarmupMultiStepLR,
        WarmupParamScheduler,
    )
    from trainkit.solver.param_groups import (
        describe_param_groups,
        get_default_optimizer_params,
        reduce_param_groups,
    )
    from trainkit.solver.schedules import SCHEDULE_REGISTRY

__all__ = [  # some are in projects
    "build_optimizer",
    "OPTIMIZER_REGISTRY",
    "OPTIMIZER_BUILDER_REGISTRY",
    "LARS",
    "CombinedOptimizer",
    "build_param_groups",
    "ParamRules",
    "PARAM_GROUP_REGISTRY",
    "build_layer_decay",
    "LAYER_DEPTH_REGISTRY",
    "get_default_optimizer_params",
    "reduce_param_groups",
    "describe_param_groups",
    "build_gradient_clipper",
    "maybe_add_gradient_clipping",
    "GradientClipper",
    "GradientClipType",
    "build_lr_scheduler",
    "build_schedule",
    "ScheduledLR",
    "SCHEDULE_REGISTRY",
    "schedules",
    "LRMultiplier",
    "WarmupParamScheduler",
    "WarmupMultiStepLR",
    "WarmupCosineLR",
    "KeepLastValue",
    "LRFunction",
]

_OF_PROJECTS = ("LARS", "LAYER_DEPTH_REGISTRY", "CombinedOptimizer", "ParamRules")
__getattr__ = lazy_names(__name__, *_OF_PROJECTS, "build_layer_decay", "build_param_groups")
