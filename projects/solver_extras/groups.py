"""The parameter groups of the keys SOLVER.PARAM_GROUPS."""

import logging
from collections.abc import Mapping
from typing import Any, get_args

from torch import nn
from trainkit.projects.solver_extras.layer_decay import build_layer_decay
from trainkit.projects.solver_extras.names import describe_param_groups
from trainkit.projects.solver_extras.rules import ParamKind, ParamRules, build_param_groups

from trainkit.config import CfgNode, ConfigError
from trainkit.solver.build import PARAM_GROUP_REGISTRY, collect_arguments
from trainkit.utils.errors import not_accepted

_GROUPS = "SOLVER.PARAM_GROUPS"

_logger = logging.getLogger(__name__)


@PARAM_GROUP_REGISTRY.register()
def groups_by_rules(cfg: CfgNode, model: nn.Module) -> list[dict[str, Any]]:
    """The builder for SOLVER.PARAM_GROUP_BUILDER.

    Raises:
        ConfigError: the rules are wrong, see `ParamRules` and `build_layer_decay`.
    """
    options, values, solver = cfg.SOLVER.PARAM_GROUPS, collect_arguments(cfg), cfg.SOLVER
    decay, kinds = values.get("weight_decay"), get_args(ParamKind)
    entries = [entry for entry in options.CUSTOM_KEYS if isinstance(entry, Mapping) and entry.get("KEY")]
    custom_keys = {entry["KEY"]: {name.lower(): entry[name] for name in entry if name != "KEY"} for entry in entries}
    if len(custom_keys) < len(options.CUSTOM_KEYS):
        accepted = "nodes with a KEY that no other has, such as {KEY: backbone.stem, LR_FACTOR: 0.1}"
        raise not_accepted(f"{_GROUPS}.CUSTOM_KEYS", options.CUSTOM_KEYS, accepted)
    factors = {
        what: {kind: factor for kind in kinds if (factor := options[f"{kind.upper()}_{what}_FACTOR"]) is not None}
        for what in ("LR", "DECAY")
    }
    layers = {name.lower(): value for name, value in options.LAYER_DECAY.items()}
    try:
        rules = ParamRules(
            weight_decay_norm=solver.WEIGHT_DECAY_NORM,
            weight_decay_bias=solver.WEIGHT_DECAY_BIAS,
            bias_lr_factor=solver.BIAS_LR_FACTOR,
            lr_factors=factors["LR"],
            decay_factors=factors["DECAY"],
            custom_keys=custom_keys,
            key_match=options.KEY_MATCH,
            custom_keys_only=options.CUSTOM_KEYS_ONLY,
            lr_factor_func=None if layers["rate"] == 1.0 else build_layer_decay(model, **layers),
        )
        groups = build_param_groups(model, values["lr"], decay, rules)
    except ValueError as error:
        raise ConfigError(f"{_GROUPS}: {error}") from error
    _logger.info("Parameter groups:\n%s", describe_param_groups(groups, model))
    return groups
