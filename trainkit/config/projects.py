"""What a config names outside of trainkit.

These are modules, in IMPORTS, and the projects whose keys it changes.
"""

import copy
import importlib
from collections.abc import Iterable
from typing import Any

from trainkit.config.config import CfgNode
from trainkit.config.defaults import keys_of
from trainkit.utils import comm
from trainkit.utils.errors import ConfigError, not_accepted
from trainkit.utils.plugins import Plugin, find_plugins


def import_modules(names: Iterable[str]) -> None:
    """Import the modules of ``cfg.IMPORTS``; call this when building, never when reading a config.

    Raises:
        ConfigError: an import fails; it is chained to the original error.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # a module may raise anything
            raise not_accepted(
                "IMPORTS",
                name,
                'a module such as "package.module", which can be imported '
                f"({type(error).__name__}: {error})",
            ) from error


def projects_in_use(cfg: CfgNode) -> list[Plugin]:
    """The plug-ins of which a key has another value than its default in ``cfg``.

    A key may be missing there.
    """
    return [plugin for plugin in find_plugins().each if has_changes(cfg, keys_of(plugin))]


def has_changes(cfg: CfgNode, defaults: CfgNode) -> bool:
    """Whether a key of ``defaults`` has another value in ``cfg``.

    None is no other value if the default is empty, 0 or False: both switch off.
    """
    has_new_keys = not set(cfg) <= set(defaults)
    if defaults.is_new_allowed() and has_new_keys:
        return True
    for name, default in defaults.items():
        if name not in cfg:
            continue
        value = cfg[name]
        if isinstance(default, CfgNode) and isinstance(value, CfgNode):
            if has_changes(value, default):
                return True
        elif value is None and not default:
            continue
        elif value != default:
            return True
    return False


def check_projects(cfg: CfgNode) -> None:
    """Raises ConfigError if a project does not accept the values of its keys."""
    for plugin in projects_in_use(cfg):
        plugin.check(with_keys_of(cfg, plugin))


def prepare_projects(cfg: CfgNode) -> CfgNode:
    """A copy of ``cfg`` that the projects in use have changed."""
    was_frozen = cfg.is_frozen()
    cfg = cfg.clone()
    cfg.defrost()
    comm.set_data_ranks()  # a project may set others
    for plugin in projects_in_use(cfg):
        cfg = with_keys_of(cfg, plugin)
        plugin.prepare(cfg)
    if was_frozen:
        cfg.freeze()
    return cfg


def scale_to_ranks(cfg: CfgNode, num_ranks: int) -> CfgNode:
    """``cfg``, after the projects in use have scaled it to this number of ranks."""
    for plugin in projects_in_use(cfg):
        cfg = plugin.scale(with_keys_of(cfg, plugin), num_ranks)
    return cfg


def wrap_model(cfg: CfgNode, model: Any) -> Any:
    """``model``, after the projects in use have wrapped it."""
    for plugin in projects_in_use(cfg):
        model = plugin.wrap_model(with_keys_of(cfg, plugin), model)
    return model


def wrap_loader(cfg: CfgNode, loader: Any) -> Any:
    """``loader``, after the projects in use have wrapped it."""
    for plugin in projects_in_use(cfg):
        loader = plugin.wrap_loader(with_keys_of(cfg, plugin), loader)
    return loader


def with_keys_of(cfg: CfgNode, plugin: Plugin) -> CfgNode:
    """``cfg`` with all keys of ``plugin``.

    If some are missing, it is a copy in which they have their defaults.
    """
    keys = keys_of(plugin)
    if _has_all(cfg, keys):
        return cfg
    cfg = cfg.clone()
    _add_missing(cfg, keys)
    return cfg


def _has_all(cfg: CfgNode, keys: CfgNode) -> bool:
    for name, default in keys.items():
        if name not in cfg:
            return False
        is_node = isinstance(default, CfgNode) and isinstance(cfg[name], CfgNode)
        if is_node and not _has_all(cfg[name], default):
            return False
    return True


def _add_missing(cfg: CfgNode, defaults: CfgNode) -> None:
    for name, default in defaults.items():
        if name not in cfg:
            cfg[name] = copy.deepcopy(default)
        elif isinstance(default, CfgNode) and isinstance(cfg[name], CfgNode):
            _add_missing(cfg[name], default)


def choose(cfg: CfgNode, key: str, value: str, because: str) -> None:
    """Set a key that only one project may set, such as SOLVER.TRAINER.

    Raises:
        ConfigError: another one has set it.
    """
    node = cfg
    *parents, name = key.split(".")
    for parent in parents:
        node = node[parent]
    if node[name] and node[name] != value:
        raise ConfigError(
            f"{key} is {node[name]!r}, but {because} needs {value!r}; set one of the two"
        )
    node[name] = value
