"""Import the modules that a config names."""

import importlib
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

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
