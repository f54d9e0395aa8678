"""Constructors that also take a config."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from yacs.config import CfgNode  # the base class of all config nodes, also those of fvcore and trainkit

from trainkit.utils.plugins import CONFIG_TYPES, type_name


def configurable(init_func: Callable[..., Any] | None = None, *, from_config: Callable[..., Any] | None = None) -> Any:
    """Let a class (by its ``__init__``) or a function be called with a config in place of its arguments.

    ``from_config(cfg, ...)``, a class method or the argument, gives a dict of arguments. ``Net(width=8)``, ``Net(cfg)``
    and ``Net(cfg, depth=3)`` then all work. A call uses the config if its first positional or its ``cfg`` argument is a
    CfgNode or an omegaconf DictConfig. Further arguments go to ``from_config`` if it has a parameter for them, else
    they win over its result.
    """

    def decorate(func: Any) -> Any:
        is_method = from_config is None
        if not inspect.isfunction(func) or (func.__name__ == "__init__") != is_method:
            raise TypeError(f"@configurable is for an __init__, with from_config=... for a function; got {func!r}")

        @functools.wraps(func)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            own, args = args[:is_method], args[is_method:]
            # of type(self), which may be a subclass that overrides it alone
            translate = getattr(type(own[0]), "from_config", None) if own else from_config
            if own and not inspect.ismethod(translate):
                raise AttributeError(f"{type(own[0]).__qualname__} needs a @classmethod from_config")
            cfg = args[0] if args else kwargs.get("cfg")
            if isinstance(cfg, CfgNode) or type_name(cfg) in CONFIG_TYPES:
                args, kwargs = (), _arguments(translate, args, kwargs)
            return func(*own, *args, **kwargs)

        if not is_method:
            wrapped.from_config = from_config  # type: ignore[attr-defined]
        return wrapped

    return decorate if init_func is None else decorate(init_func)


def _arguments(from_config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(from_config).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    known = {key: value for key, value in kwargs.items() if takes_any or key in names}
    return from_config(*args, **known) | {key: value for key, value in kwargs.items() if key not in known}
