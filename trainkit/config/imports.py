"""Import the modules that a config names, and let projects prepare a config."""

import importlib
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

from trainkit.config.config import CfgNode, projects_of
from trainkit.config.errors import ConfigError

import_check: ContextVar[Callable[[Iterable[Any]], None] | None] = ContextVar("import_check", default=None)
"""Called before anything is imported; raises a ConfigError for modules that must not be."""


def import_modules(names: Iterable[str]) -> None:
    """Import the modules of ``cfg.IMPORTS`` in their order; call this when building, never when reading a config.

    Raises:
        ConfigError: an entry is not a dotted module name, or its import fails; it is chained to the original error.
    """
    names = [*names]
    if (check := import_check.get()) is not None:
        check(names)
    for name in names:
        if (
            not isinstance(name, str)
            or not all(part.isidentifier() for part in name.split("."))
            or name.endswith(".py")
        ):
            raise ConfigError(
                f'IMPORTS: {name!r} is no module; give a dotted module name, such as "package.module" for the file '
                "package/module.py"
            )
        try:
            importlib.import_module(name)
        except Exception as error:  # a module may raise anything
            raise ConfigError(
                f"IMPORTS: {name!r} cannot be imported: {type(error).__name__}: {error} "
                "(where a module is not found, install it or put its top folder on PYTHONPATH)"
            ) from error


def prepare_projects(cfg: CfgNode) -> CfgNode:
    """A copy of ``cfg`` that the projects whose keys are in it have changed, see `CONFIG_KEYS`.

    Raises:
        ConfigError: two projects change the same key.
    """
    cfg, was_frozen = cfg.clone(), cfg.is_frozen()
    cfg.defrost()
    for project in projects_of(cfg):
        getattr(project, "prepare", lambda _: None)(cfg)
    if was_frozen:
        cfg.freeze()
    return cfg


def choose(cfg: CfgNode, key: str, value: str, because: str) -> None:
    """Set a key that only one project may set, such as SOLVER.TRAINER. Raises ConfigError if another one has."""
    parent, _, name = key.rpartition(".")
    node = cfg
    for part in filter(None, parent.split(".")):
        node = node[part]
    if node[name] not in ("", value):
        raise ConfigError(f"{key} is {node[name]!r}, but {because} needs {value!r}; set one of the two")
    node[name] = value
