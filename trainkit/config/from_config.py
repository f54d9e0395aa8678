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
        AttributeError: an object is made, and its class has no class method ``from_config``.
        TypeError: something else is decorated.
    """

    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        is_method = from_config is None
        if not inspect.isfunction(func) or (func.__name__ == "__init__") != is_method:
            raise TypeError(f"@configurable is for an __init__, with from_config=... for a function; got {func!r}")

        @functools.wraps(func)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            own = args[:1] if is_method else ()
            # of type(self), which may be a subclass that overrides it alone
            translate = getattr(type(own[0]), "from_config", None) if own else from_config
            if own and not inspect.ismethod(translate):
                raise AttributeError(
                    f"{type(own[0]).__qualname__} is configurable and needs a @classmethod from_config"
                )
            args, kwargs = _translate(translate, args[len(own) :], kwargs)
            return func(*own, *args, **kwargs)

        if not is_method:
            wrapped.from_config = from_config  # type: ignore[attr-defined]
        return wrapped

    return decorate if init_func is None else decorate(init_func)


def _translate(
    from_config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the call itself: the given ones, unless one of them is a config."""
    cfg = args[0] if args else kwargs.get("cfg")
    if not isinstance(cfg, CfgNode) and type_name(cfg) not in CONFIG_TYPES:
        return args, kwargs
    parameters = inspect.signature(from_config).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    known = {key: value for key, value in kwargs.items() if takes_any or key in names}
    return (), from_config(*args, **known) | {key: value for key, value in kwargs.items() if key not in known}
