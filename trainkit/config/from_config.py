"""Constructors that also take a config."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

# the base class of all config nodes, also those of fvcore and trainkit
from yacs.config import CfgNode

from trainkit.utils.plugins import find_plugins, type_name


def configurable(
    init_func: Callable[..., Any] | None = None, *, from_config: Callable[..., Any] | None = None
) -> Any:
    """Let a class or a function be called with a config in place of its arguments.

    It decorates the function, or the ``__init__`` of the class. ``from_config(cfg, ...)``, a class
    method or the argument, gives a dict of arguments. ``Net(width=8)``, ``Net(cfg)`` and
    ``Net(cfg, depth=3)`` then all work. A call uses the config if its first positional or its
    ``cfg`` argument is a CfgNode or an omegaconf DictConfig. Further arguments go to
    ``from_config`` if it has a parameter for them, else they win over its result.

    Raises:
        TypeError: a function is decorated without ``from_config``; and, in a call, ``from_config``
            is no class method, or its first parameter is not ``cfg``.
        AttributeError: in a call, the class has no ``from_config``.
    """
    if init_func is None:
        return functools.partial(configurable, from_config=from_config)
    if from_config is not None:
        return _configurable_function(init_func, from_config)
    if init_func.__name__ != "__init__":
        raise TypeError(
            f"@configurable decorates the __init__ of a class, got {init_func.__qualname__}; "
            "write @configurable(from_config=...) for a function"
        )

    @functools.wraps(init_func)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        from_config = _class_method_of(type(self))  # which may be a subclass that overrides it
        if _is_called_with_config(args, kwargs):
            init_func(self, **_arguments(from_config, args, kwargs))
        else:
            init_func(self, *args, **kwargs)

    return wrapped


def _configurable_function(
    function: Callable[..., Any], from_config: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _is_called_with_config(args, kwargs):
            return function(**_arguments(from_config, args, kwargs))
        return function(*args, **kwargs)

    wrapped.from_config = from_config  # type: ignore[attr-defined]
    return wrapped


def _is_called_with_config(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    cfg = args[0] if args else kwargs.get("cfg")
    if isinstance(cfg, CfgNode):
        return True
    return type_name(cfg) in find_plugins().config_types


def _class_method_of(owner: type) -> Callable[..., Any]:
    name = f"{owner.__module__}.{owner.__qualname__}"
    if not hasattr(owner, "from_config"):
        raise AttributeError(
            f"{name} has no from_config; a class with @configurable needs it, as a class method"
        )
    if not inspect.ismethod(owner.from_config):
        raise TypeError(f"{name}.from_config must be a class method; decorate it by @classmethod")
    return owner.from_config


def _arguments(
    from_config: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call with a config."""
    signature = inspect.signature(from_config)
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].name != "cfg":
        raise TypeError(
            f"the first parameter of {from_config.__qualname__} must be cfg, got {signature}"
        )
    takes_any = False
    accepted = set()
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            accepted.add(parameter.name)
    for_config = {}
    for_call = {}
    for name, value in kwargs.items():
        if takes_any or name in accepted:
            for_config[name] = value
        else:
            for_call[name] = value
    arguments: dict[str, Any] = from_config(*args, **for_config)
    return {**arguments, **for_call}
