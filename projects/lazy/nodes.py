"""Nodes of a `LazyConfig`, which come from omegaconf (an optional package), and their form as plain Python."""

import dataclasses
import functools
import importlib
from typing import Any

from trainkit.projects.lazy.locate import locate

from trainkit.utils.errors import ConfigError

TARGET = "_target_"  # the key of the callable in a node that describes a call


def is_node(value: Any) -> bool:
    """Whether ``value`` is a node, or a dict that can become one."""
    return isinstance(value, dict) or bool(_omegaconf().OmegaConf.is_config(value))


def to_node(value: Any, where: str) -> Any:
    """Make a node from a dict, a list or another node, with values as in `to_plain`.

    Args:
        where: the name in errors, such as the file.

    Raises:
        ConfigError: a node cannot hold a value.
    """
    omegaconf = _omegaconf()
    try:
        plain = to_plain(value)
        node = omegaconf.DictConfig if isinstance(plain, dict) else omegaconf.ListConfig
        return node(plain, flags={"allow_objects": True})
    except (ConfigError, omegaconf.errors.OmegaConfBaseException) as error:
        raise ConfigError(f"{where}: {error}") from error


def to_plain(value: Any, key: str = "", *, resolve: bool = False) -> Any:
    """Convert nodes to dicts, lists and tuples to lists, dataclasses to the calls that make them.

    Targets that are classes of dataclasses, dicts and lists become dotted paths: omegaconf would treat them as
    instances.

    Args:
        key: the place of ``value``, for errors.

    Raises:
        ConfigError: a reference is wrong; a value is the class of a dataclass.
    """
    value = to_container(value, resolve=resolve)
    if isinstance(value, dict):
        plain = {TARGET: _plain_target(value[TARGET], key)} if TARGET in value else {}
        items = {name: item for name, item in value.items() if name != TARGET}
        return plain | {name: to_plain(items[name], f"{key}.{name}", resolve=resolve) for name in items}
    if isinstance(value, list | tuple):
        return [to_plain(item, f"{key}.{i}", resolve=resolve) for i, item in enumerate(value)]
    if not dataclasses.is_dataclass(value):
        return value
    if isinstance(value, type):
        raise ConfigError(
            f"{key[1:]} is the class of a dataclass, which a node cannot hold; write LazyCall({name_of(value)})(...)"
        )
    arguments = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return to_plain({TARGET: type(value), **arguments}, key, resolve=resolve)


def _plain_target(target: Any, key: str) -> Any:
    if is_node(target):
        return to_plain(target, f"{key}.{TARGET}")
    is_dataclass = isinstance(target, type) and dataclasses.is_dataclass(target)
    if not is_dataclass and not (isinstance(target, type) and issubclass(target, (dict, list, tuple))):
        return target
    path = path_of(target)
    return functools.partial(path) if is_dataclass and path is target else path


def to_container(value: Any, *, resolve: bool) -> Any:
    """A node as dicts, lists and tuples; any other value as it is.

    Args:
        resolve: replace references by their values; a missing value is then an error.

    Raises:
        ConfigError: a reference is wrong.
    """
    omegaconf = _omegaconf()
    if not omegaconf.OmegaConf.is_config(value):
        return value
    try:
        mode = omegaconf.SCMode.INSTANTIATE  # keeps dataclasses
        container = omegaconf.OmegaConf.to_container
        return container(value, resolve=resolve, throw_on_missing=resolve, structured_config_mode=mode)
    except omegaconf.errors.OmegaConfBaseException as error:
        raise ConfigError(str(error)) from error


def update(cfg: Any, key: str, value: Any) -> None:
    """Set the value of a dotted key, or merge a dict into the node under this key."""
    _omegaconf().OmegaConf.update(cfg, key, to_plain(value), merge=True)


def name_of(target: Any) -> str:
    """The name of a target in errors."""
    if isinstance(target, str):
        return target
    return f"{target.__module__}.{target.__qualname__}" if hasattr(target, "__qualname__") else repr(target)


def path_of(target: Any) -> Any:
    """The dotted path of ``target``; itself if there is none."""
    if not hasattr(target, "__qualname__"):
        return target
    try:
        return name_of(target) if locate(name_of(target)) == target else target
    except ImportError:
        return target


def _omegaconf() -> Any:
    """Raises ConfigError if omegaconf is not installed."""
    try:
        return importlib.import_module("omegaconf")
    except ModuleNotFoundError as error:
        raise ConfigError("LazyConfig needs the package omegaconf: pip install 'trainkit[lazy]'") from error
