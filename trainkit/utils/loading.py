"""Import modules and names of projects when they are asked for."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any


class MissingProjectError(ImportError):
    """The project of a module of these tables is not installed."""


def module_names() -> Mapping[str, str]:
    """`NAMES` of the table of projects, which is loaded when a name is not found elsewhere."""
    names: Mapping[str, str] = importlib.import_module("trainkit.utils.plugins").NAMES
    return names


def load_plugin(module: str) -> ModuleType:
    """Import a module of the tables. Raises MissingProjectError if its project is not there."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        project = ".".join(module.split(".")[:3])
        raise MissingProjectError(
            f"this needs the project {project}, which is not installed"
        ) from error


def installed(table: Mapping[str, str]) -> Iterator[tuple[str, ModuleType]]:
    """The names of a table with their modules, without those whose project is not there."""
    for name, module in table.items():
        with contextlib.suppress(MissingProjectError):
            yield name, load_plugin(module)


def names_on_demand(package: str, *names: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package for ``names`` of `NAMES`: a project is imported when asked for one."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(load_plugin(module_names()[name]), name)

    return get
