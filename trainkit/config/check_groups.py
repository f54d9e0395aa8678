"""What SOLVER.PARAM_GROUPS has to fulfil."""

from typing import Any

from fvcore.common.config import CfgNode

from trainkit.config.errors import ConfigError
from trainkit.utils.numbers import is_number

_NODE = "SOLVER.PARAM_GROUPS"


def check_param_groups(solver: CfgNode) -> None:
    """Find factors out of range, malformed custom keys and options that contradict each other.

    Raises:
        ConfigError: names the key, the value and what is accepted.
    """
    options, layer_decay = solver.PARAM_GROUPS, solver.PARAM_GROUPS.LAYER_DECAY
    given = {f"{_NODE}.{key}": value for key, value in options.items() if key.endswith("_FACTOR") and value is not None}
    given |= _custom_factors(options.CUSTOM_KEYS)
    for key, factor in given.items():
        if not is_number(factor) or not factor >= 0:
            raise ConfigError(f"{key} is {factor!r}; accepted: a number of at least 0")
    if not 0 < layer_decay.RATE <= 1:
        raise ConfigError(f"{_NODE}.LAYER_DECAY.RATE is {layer_decay.RATE}; it must be above 0, and at most 1 (off)")
    if layer_decay.RATE != 1 and not layer_decay.SCHEME:
        raise ConfigError(
            f"{_NODE}.LAYER_DECAY.RATE is {layer_decay.RATE}, but SCHEME is empty; set it to the kind of the model, "
            "such as vit"
        )
    if layer_decay.RATE != 1:
        given[f"{_NODE}.LAYER_DECAY.RATE"] = layer_decay.RATE
    if options.CUSTOM_KEYS:
        given[f"{_NODE}.CUSTOM_KEYS"] = options.CUSTOM_KEYS
    if options.BUILDER and given:
        raise ConfigError(
            f"{_NODE}.BUILDER is {options.BUILDER!r}, which makes the groups alone; leave it out, or {', '.join(given)}"
        )
    if options.NORM_DECAY_FACTOR and solver.WEIGHT_DECAY and not solver.WEIGHT_DECAY_NORM:
        raise ConfigError(
            f"{_NODE}.NORM_DECAY_FACTOR is {options.NORM_DECAY_FACTOR}, but it multiplies SOLVER.WEIGHT_DECAY_NORM, "
            f"which is 0; set that to {solver.WEIGHT_DECAY}, SOLVER.WEIGHT_DECAY, or leave the factor out"
        )


def _custom_factors(entries: list[Any]) -> dict[str, Any]:
    factors: dict[str, Any] = {}
    seen = set()
    for entry in entries:
        key = entry.get("KEY") if isinstance(entry, dict) else None
        if not isinstance(key, str) or not key or key in seen:
            raise ConfigError(
                f"{_NODE}.CUSTOM_KEYS has the entry {entry!r}; each one is a node with a KEY that no other has, a part "
                "of the names of parameters, such as {KEY: backbone.stem, LR_FACTOR: 0.1}"
            )
        seen.add(key)
        factors |= {
            f"{_NODE}.CUSTOM_KEYS, {key}, {name}": entry[name]
            for name in entry
            if name in ("LR_FACTOR", "DECAY_FACTOR")
        }
    return factors
