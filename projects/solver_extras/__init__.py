"""LARS, several optimizers in one, and learning rates by layer, kind and name of a parameter."""

from trainkit.projects.solver_extras.combined import CombinedOptimizer
from trainkit.projects.solver_extras.lars import LARS
from trainkit.projects.solver_extras.layer_decay import LAYER_DEPTH_REGISTRY, build_layer_decay
from trainkit.projects.solver_extras.rules import ParamRules, build_param_groups

__all__ = ["LARS", "LAYER_DEPTH_REGISTRY", "CombinedOptimizer", "ParamRules", "build_layer_decay", "build_param_groups"]
