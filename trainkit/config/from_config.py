"""Constructors that also take a config."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from yacs.config import (
    CfgNode,
)  # the base class of all config nodes, also those of fvcore and trainkit

from trainkit.utils.plugins import CONFIG_TYPES, type_name


def configurable(
    init_func: Callable[..., Any] | None = None, *, from_config: Callable[..., Any] | None = None
) -> Any:
    """Let a class (by its ``__init__``) or a function be called with a config in place of its arguments.

    ``from_config(cfg, ...)``, a class method or the argument, gives a dict of arguments. ``Net(width=8)``, ``Net(cfg)``
    and ``Net(cfg, depth=3)`` then all work. A call uses the config if its first positional or its ``cfg`` argument is a
    CfgNode or an omegaconf DictConfig. Further arguments go to ``from_config`` if it has a parameter for them, else
    they win over its result.
    """
    if init_func is None:
        return functools.partial(configurable, from_config=from_config)

    @functools.wraps(init_func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        own, args = ((), args) if from_config else (args[:1], args[1:])
        cfg = args[0] if args else kwargs.get("cfg")
        if isinstance(cfg, CfgNode) or type_name(cfg) in CONFIG_TYPES:
            # of type(self), which may be a subclass that overrides it alone
            args, kwargs = (), _arguments(from_config or type(own[0]).from_config, args, kwargs)
        return init_func(*own, *args, **kwargs)

    if from_config:
        wrapped.from_config = from_config  # type: ignore[attr-defined]
    return wrapped


def _arguments(from_config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(from_config).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    known = {key: value for key, value in kwargs.items() if takes_any or key in names}
    return from_config(*args, **known) | {
        key: value for key, value in kwargs.items() if key not in known
    }
