"""LARS, several optimizers in one, parameter groups by rules, and composed schedules."""

from trainkit.projects.solver_extras.combined import LARS, CombinedOptimizer
from trainkit.projects.solver_extras.layer_decay import LAYER_DEPTH_REGISTRY, build_layer_decay
from trainkit.projects.solver_extras.rules import ParamRules, build_param_groups, describe_param_groups, group_names
from trainkit.projects.solver_extras.schedules import SCHEDULE_REGISTRY, build_schedule

__all__ = ["LARS", "LAYER_DEPTH_REGISTRY", "SCHEDULE_REGISTRY", "CombinedOptimizer", "ParamRules"]
__all__ += ["build_layer_decay", "build_param_groups", "build_schedule", "describe_param_groups", "group_names"]
