"""Optimizers, parameter groups, gradient clipping and learning rate schedules."""

from torch.optim.lr_scheduler import LRScheduler as LRScheduler  # from here too, as in detectron2

from trainkit.solver.build import (
    LR_SCHEDULER_BUILDER_REGISTRY,
    OPTIMIZER_BUILDER_REGISTRY,
    OPTIMIZER_REGISTRY,
    PARAM_GROUP_REGISTRY,
    build_gradient_clipper,
    build_lr_scheduler,
    build_optimizer,
    maybe_add_gradient_clipping,
)
from trainkit.solver.clipping import (
    GradientClipper,
    GradientClipType,
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
from trainkit.utils.plugins import lending

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
]

__getattr__, __dir__ = lending(__name__)
