"""What a config names outside of trainkit: modules in IMPORTS, and projects whose keys it has, see `CONFIG_KEYS`."""

import importlib
from collections.abc import Iterable
from functools import reduce
from operator import getitem
from types import ModuleType
from typing import Any

from trainkit.config.config import CfgNode, get_key
from trainkit.utils import comm
from trainkit.utils.errors import ConfigError, not_accepted
from trainkit.utils.loading import load_plugin
from trainkit.utils.plugins import CONFIG_KEYS


def import_modules(names: Iterable[str]) -> None:
    """Import the modules of ``cfg.IMPORTS``; call this when building, never when reading a config.

    Raises:
        ConfigError: an import fails; it is chained to the original error.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # a module may raise anything
            accepted = f'a module such as "package.module", which can be imported ({type(error).__name__}: {error})'
            raise not_accepted("IMPORTS", name, accepted) from error


def projects_of(cfg: CfgNode) -> list[ModuleType]:
    """The modules that declare keys which are in ``cfg``; each once."""
    found = dict.fromkeys(
        module for key, module in CONFIG_KEYS.items() if get_key(cfg, key) is not None
    )
    return [load_plugin(module) for module in found]


def prepare_projects(cfg: CfgNode) -> CfgNode:
    """A copy of ``cfg`` that its projects have changed."""
    cfg, was_frozen = cfg.clone(), cfg.is_frozen()
    cfg.defrost()
    comm.set_data_ranks()  # a project may set others
    for project in projects_of(cfg):
        getattr(project, "prepare", lambda _: None)(cfg)
    if was_frozen:
        cfg.freeze()
    return cfg


def wrap_by_projects(function: str, cfg: CfgNode, part: Any) -> Any:
    """``part``, after each project of ``cfg`` has wrapped it by its ``function``."""
    for project in projects_of(cfg):
        part = getattr(project, function, lambda _, same: same)(cfg, part)
    return part


def choose(cfg: CfgNode, key: str, value: str, because: str) -> None:
    """Set a key that only one project may set, such as SOLVER.TRAINER. Raises ConfigError if another one has."""
    *parents, name = key.split(".")
    node = reduce(getitem, parents, cfg)
    if node[name] and node[name] != value:
        raise ConfigError(
            f"{key} is {node[name]!r}, but {because} needs {value!r}; set one of the two"
        )
    node[name] = value
