"""The parameter groups of the keys SOLVER.PARAM_GROUPS."""

import logging
from typing import Any, get_args

from torch import nn
from trainkit.projects.solver_extras.layer_decay import build_layer_decay
from trainkit.projects.solver_extras.names import describe_param_groups
from trainkit.projects.solver_extras.rules import ParamKind, ParamRules, build_param_groups

from trainkit.config import CfgNode, ConfigError
from trainkit.solver.build import PARAM_GROUP_REGISTRY, collect_arguments

_GROUPS = "SOLVER.PARAM_GROUPS"

_logger = logging.getLogger(__name__)


@PARAM_GROUP_REGISTRY.register()
def groups_by_rules(cfg: CfgNode, model: nn.Module) -> list[dict[str, Any]]:
    """The builder for SOLVER.PARAM_GROUP_BUILDER.

    Raises:
        ConfigError: the rules are wrong, see `ParamRules` and `build_layer_decay`.
    """
    options, values = cfg.SOLVER.PARAM_GROUPS, collect_arguments(cfg)
    weight_decay, lr_factor_func = values.get("weight_decay"), None
    try:
        if options.LAYER_DECAY.RATE != 1.0:
            arguments = {name.lower(): value for name, value in options.LAYER_DECAY.items()}
            scheme = arguments["scheme"]
            if "." in scheme and scheme.rpartition(".")[0] not in cfg.IMPORTS:
                raise ValueError(f"SCHEME is {scheme!r}, but only IMPORTS names code; add the module to IMPORTS")
            lr_factor_func = build_layer_decay(model, **arguments)
    except ValueError as error:
        raise ConfigError(f"{_GROUPS}.LAYER_DECAY: {error}") from error
    try:
        rules = ParamRules(
            weight_decay_norm=None if weight_decay is None else cfg.SOLVER.WEIGHT_DECAY_NORM,
            weight_decay_bias=None if weight_decay is None else cfg.SOLVER.WEIGHT_DECAY_BIAS,
            bias_lr_factor=cfg.SOLVER.BIAS_LR_FACTOR,
            lr_factors=_factors(options, "LR"),
            decay_factors=_factors(options, "DECAY"),
            custom_keys={
                entry["KEY"]: {name.lower(): value for name, value in entry.items() if name != "KEY"}
                for entry in options.CUSTOM_KEYS
            },
            key_match=options.KEY_MATCH,
            custom_keys_only=options.CUSTOM_KEYS_ONLY,
            lr_factor_func=lr_factor_func,
        )
        groups = build_param_groups(model, values["lr"], weight_decay, rules)
    except ValueError as error:
        raise ConfigError(f"{_GROUPS}: {error}") from error
    _logger.info("Parameter groups:\n%s", describe_param_groups(groups, model))
    return groups


def _factors(options: CfgNode, what: str) -> dict[ParamKind, float]:
    factors = {kind: options[f"{kind.upper()}_{what}_FACTOR"] for kind in get_args(ParamKind)}
    return {kind: factor for kind, factor in factors.items() if factor is not None}
