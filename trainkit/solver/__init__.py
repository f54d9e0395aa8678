"""Optimizers, parameter groups, gradient clipping and learning rate schedules."""

from torch.optim.lr_scheduler import LRScheduler as LRScheduler  # from here too, as in detectron2

from trainkit.solver.build import (
    LR_SCHEDULER_BUILDER_REGISTRY,
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
from trainkit.solver.lr_scheduler import (
    LRFunction,
    LRMultiplier,
    ScheduledLR,
    WarmupParamScheduler,
)
from trainkit.solver.param_groups import (
    get_default_optimizer_params,
    reduce_param_groups,
    start_momentum,
)
from trainkit.utils.loading import names_on_demand

_OF_PROJECTS = [
    "LARS",
    "LAYER_DEPTH_REGISTRY",
    "SCHEDULE_REGISTRY",
    "CombinedOptimizer",
    "ParamRules",
    "KeepLastValue",
]
_OF_PROJECTS += [
    "WarmupCosineLR",
    "WarmupMultiStepLR",
    "build_layer_decay",
    "build_param_groups",
    "build_schedule",
]
_OF_PROJECTS += ["describe_param_groups", "schedules"]

__all__ = [
    "build_optimizer",
    "OPTIMIZER_REGISTRY",
    "OPTIMIZER_BUILDER_REGISTRY",
    "PARAM_GROUP_REGISTRY",
]
__all__ += [
    "get_default_optimizer_params",
    "reduce_param_groups",
    "build_gradient_clipper",
    "GradientClipper",
]
__all__ += [
    "GradientClipType",
    "maybe_add_gradient_clipping",
    "build_lr_scheduler",
    "LR_SCHEDULER_BUILDER_REGISTRY",
]
__all__ += [
    "ScheduledLR",
    "LRFunction",
    "LRMultiplier",
    "WarmupParamScheduler",
    "start_momentum",
    *_OF_PROJECTS,
]

__getattr__ = names_on_demand(__name__, *_OF_PROJECTS)
