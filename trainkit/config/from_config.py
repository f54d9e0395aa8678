"""Constructors that also take a config."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

from yacs.config import CfgNode  # the base class of all config nodes, also those of fvcore and trainkit

from trainkit.utils.plugins import CONFIG_TYPES, type_name

_Func = TypeVar("_Func", bound=Callable[..., Any])
_R = TypeVar("_R")


@overload
def configurable(init_func: _Func) -> _Func: ...
@overload
def configurable(
    *, from_config: Callable[..., dict[str, Any]] | None = None
) -> Callable[[Callable[..., _R]], Callable[..., _R]]: ...


def configurable(
    init_func: Callable[..., Any] | None = None, *, from_config: Callable[..., dict[str, Any]] | None = None
) -> Callable[..., Any]:
    """Let a function, or a class by its ``__init__``, be called with a config in place of its arguments.

    ``from_config(cfg, ...)`` translates a config into a dict of arguments::

        class Net(nn.Module):
            @configurable
            def __init__(self, width, depth=2): ...

            @classmethod
            def from_config(cls, cfg):
                return {"width": cfg.MODEL.WIDTH}


        @configurable(from_config=lambda cfg: {"width": cfg.MODEL.WIDTH})
        def build(width, depth=2): ...

    ``Net(width=8)``, ``Net(cfg)``, ``Net(cfg=cfg)`` and ``Net(cfg, depth=3)`` then all work. A call uses the config if
    its first positional or its ``cfg`` argument is a CfgNode or an omegaconf DictConfig. Further arguments go to
    ``from_config`` if it has a parameter for them, else to the constructor, where they win over the result of
    ``from_config``.

    Raises:
        AttributeError: an object is made, and its class has no ``from_config``.
        TypeError: something else is decorated; ``from_config`` is not a class method, or does not return a dict.
    """
    if init_func is None:
        return functools.partial(_configurable_function, from_config=from_config) if from_config else configurable
    if not inspect.isfunction(init_func) or init_func.__name__ != "__init__" or from_config is not None:
        raise TypeError(
            f"write @configurable above the __init__ of a class, or @configurable(from_config=...) above a function, "
            f"got {init_func!r}"
        )

    @functools.wraps(init_func)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        # type(self), so that a subclass can override only from_config
        from_config = getattr(type(self), "from_config", None)
        if not inspect.ismethod(from_config):
            kind = AttributeError if from_config is None else TypeError
            raise kind(
                f"{type(self).__qualname__} has @configurable and needs a @classmethod from_config(cls, cfg) "
                "that returns the arguments of its __init__ as a dict"
            )
        args, kwargs = _translate(from_config, args, kwargs)
        init_func(self, *args, **kwargs)

    return wrapped


def _configurable_function(func: _Func, *, from_config: Callable[..., dict[str, Any]]) -> _Func:
    if not inspect.isfunction(func):
        raise TypeError(
            f"@configurable(from_config=...) decorates a function, got {func!r}; for a class decorate its __init__ "
            "with @configurable and give it a classmethod from_config"
        )

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _translate(from_config, args, kwargs)
        return func(*args, **kwargs)

    wrapped.from_config = from_config  # type: ignore[attr-defined]
    return wrapped  # type: ignore[return-value]


def _translate(
    from_config: Callable[..., dict[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the call itself: the given ones, unless one of them is a config."""
    cfg = args[0] if args else kwargs.get("cfg")
    if not isinstance(cfg, CfgNode) and type_name(cfg) not in CONFIG_TYPES:
        return args, kwargs
    parameters = inspect.signature(from_config).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if "cfg" not in (p.name for p in list(parameters)[:1]):
        raise TypeError(f"the first parameter of {from_config.__qualname__} must be called cfg; rename it")
    to_from_config = {key: value for key, value in kwargs.items() if takes_any or key in names}
    arguments = from_config(*args, **to_from_config)
    if not isinstance(arguments, dict):
        raise TypeError(
            f"{from_config.__qualname__} must return the arguments as a dict, got {type(arguments).__name__}"
        )
    return (), arguments | {key: value for key, value in kwargs.items() if key not in to_from_config}
