"""Nodes of a `LazyConfig`, which come from omegaconf (an optional package), and objects by their dotted path."""

import contextlib
import dataclasses
import importlib
from collections import OrderedDict
from typing import Any

from trainkit.utils.errors import ConfigError

TARGET = "_target_"  # the key of the callable in a node that describes a call


def locate(name: str) -> Any:
    """The object of a dotted path, such as ``"torch.optim.SGD"``; imports the module that holds it.

    Raises ImportError: there is no such module or attribute, or importing the module fails.
    """
    parts = name.split(".")
    try:
        for depth in range(len(parts), 0, -1):
            module = ".".join(parts[:depth])
            try:
                found = importlib.import_module(module)
            except ModuleNotFoundError as error:
                if depth > 1 and f"{module}.".startswith(f"{error.name}."):
                    continue  # the last part may be an attribute
                raise
            for attribute in parts[depth:]:
                found = getattr(found, attribute)
            return found
    except Exception as error:  # the module's code may raise anything
        raise ImportError(f"cannot locate {name!r}: {type(error).__name__}: {error}") from error


def _convert_target_to_string(t: Any) -> str:
    """The shortest path by which ``locate`` finds a class or function, such as ``"torch.optim.SGD"``."""
    parents = t.__module__.split(".")
    for depth in range(1, len(parents)):
        path = ".".join([*parents[:depth], t.__qualname__])
        with contextlib.suppress(ImportError):
            if locate(path) is t:
                return path
    return f"{t.__module__}.{t.__qualname__}"


def is_node(value: Any) -> bool:
    """Whether ``value`` is a node, or a dict that can become one."""
    return isinstance(value, dict) or bool(_omegaconf().OmegaConf.is_config(value))


def to_node(value: Any) -> Any:
    """Make a node from a dict, a list or another node, with values as in `to_plain`."""
    return _omegaconf().OmegaConf.create(to_plain(value), flags={"allow_objects": True})


def to_plain(value: Any, *, resolve: bool = False) -> Any:
    """Convert nodes to dicts, lists and tuples to lists, and dataclasses to the calls that make them."""
    value = to_container(value, resolve=resolve)
    if isinstance(value, dict):
        plain = {name: to_plain(item, resolve=resolve) for name, item in value.items()}
        if _stands_for_a_node(plain.get(TARGET)):
            plain[TARGET] = path_of(plain[TARGET])
        return plain
    if isinstance(value, list | tuple):
        return [to_plain(item, resolve=resolve) for item in value]
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return value
    call: dict[str, Any] = {TARGET: type(value)}
    for field in dataclasses.fields(value):
        if field.init:
            call[field.name] = getattr(value, field.name)
    return to_plain(call, resolve=resolve)


def _stands_for_a_node(target: Any) -> bool:
    """Whether omegaconf reads a class as the description of a node, so that no node can hold the class itself."""
    if target in (dict, OrderedDict):
        return True
    is_attrs_class = hasattr(target, "__attrs_attrs__")
    return isinstance(target, type) and (dataclasses.is_dataclass(target) or is_attrs_class)


def with_paths(plain: Any) -> Any:
    """What `to_plain` gives, with the path of each target in place of the target."""
    if isinstance(plain, list):
        return [with_paths(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    named = {name: with_paths(item) for name, item in plain.items()}
    if TARGET in named:
        target = named.pop(TARGET)
        named = {TARGET: path_of(target), **named}
    return named


def to_container(value: Any, *, resolve: bool) -> Any:
    """A node as dicts, lists and tuples; any other value as it is. ``resolve``: with values in place of references."""
    omegaconf = _omegaconf()
    if not omegaconf.OmegaConf.is_config(value):
        return value
    mode = {"structured_config_mode": omegaconf.SCMode.INSTANTIATE}  # keeps dataclasses
    return omegaconf.OmegaConf.to_container(
        value, resolve=resolve, throw_on_missing=resolve, **mode
    )


def update(cfg: Any, key: str, value: Any) -> None:
    """Set the value of a dotted key, or merge a dict into the node under this key."""
    _omegaconf().OmegaConf.update(cfg, key, to_plain(value), merge=True)


def name_of(target: Any) -> str:
    """The name of a target in errors."""
    if isinstance(target, str):
        return target
    if _is_in_a_module(target):
        return f"{target.__module__}.{target.__qualname__}"
    return repr(target)


def _is_in_a_module(target: Any) -> bool:
    """Whether ``target`` says where it is defined: a generator and a method of a class in C do not."""
    has_module = hasattr(target, "__module__") and isinstance(target.__module__, str)
    return has_module and hasattr(target, "__qualname__")


def path_of(target: Any) -> Any:
    """The shortest dotted path of ``target``; itself if there is none."""
    if not _is_in_a_module(target):
        return target
    path = _convert_target_to_string(target)
    with contextlib.suppress(ImportError):
        if locate(path) == target:
            return path
    return target


def _omegaconf() -> Any:
    """Raises ConfigError if omegaconf is not installed."""
    try:
        return importlib.import_module("omegaconf")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "LazyConfig needs the package omegaconf: pip install 'trainkit[lazy]'"
        ) from error
