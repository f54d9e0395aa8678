"""Find objects by their dotted path."""

import contextlib
import importlib
from functools import reduce
from typing import Any


def locate(name: str) -> Any:
    """The object of a dotted path, such as ``"torch.optim.SGD"``; imports the module that holds it.

    Raises:
        ImportError: there is no such module or attribute, or importing the module fails.
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
            return reduce(getattr, parts[depth:], found)
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
