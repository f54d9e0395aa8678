"""Make the calls that a config describes."""

import operator
from typing import Any

from trainkit.projects.lazy.locate import locate
from trainkit.projects.lazy.nodes import TARGET, name_of, to_container

from trainkit.utils.errors import ConfigError


def instantiate(cfg: Any) -> Any:
    """Make every call that ``cfg`` describes, inner calls first.

    Args:
        cfg: a node, dict, list or tuple, which stays unchanged. A value without a call is returned as it is.

    Returns:
        The result of the call for a node with a ``_target_``; else a dict, list or tuple. Targets get dicts and lists,
        never omegaconf's types.

    Raises:
        ConfigError: a target is not found, or raises a TypeError or ValueError; the message has its name and those of
            its arguments. Other errors are not changed.
    """
    cfg = to_container(cfg, resolve=True)
    if type(cfg) in (list, tuple):
        items = [*map(instantiate, cfg)]
        return cfg if all(map(operator.is_, items, cfg)) else type(cfg)(items)
    if type(cfg) is not dict:
        return cfg
    values = {name: instantiate(item) for name, item in cfg.items()}
    if TARGET in values:
        return _call(values.pop(TARGET), values)
    return cfg if all(map(operator.is_, values.values(), cfg.values())) else values


def _call(target: Any, arguments: dict[str, Any]) -> Any:
    call = f"{name_of(target)}({', '.join(map(str, arguments))})"
    try:
        return (locate(target) if isinstance(target, str) else target)(**arguments)
    except (ImportError, TypeError, ValueError) as error:  # raised by constructors for wrong arguments
        raise ConfigError(f"{call} failed: {type(error).__name__}: {error}") from error
