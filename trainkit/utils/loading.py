"""Import what is asked for by name: modules of projects, and the names of packages."""

import ast
import contextlib
import importlib
import inspect
import sys
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
    """The ``__getattr__`` of a package that imports its names when they are first asked for.

    The names are those of the package's ``if TYPE_CHECKING:``, read from its source, and further ``names`` of `NAMES`.
    """
    blocks = [
        node
        for node in ast.parse(inspect.getsource(sys.modules[package])).body
        if isinstance(node, ast.If)
    ]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        module = module_names()[name] if name in names else modules.get(name)
        if (
            module is None
            and "*" in modules
            and name in importlib.import_module(modules["*"]).__all__
        ):
            module = modules["*"]
        if module is None or name == "*":
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return (
            importlib.import_module(f"{package}.{name}")
            if module == package
            else getattr(load_plugin(module), name)
        )

    return get
