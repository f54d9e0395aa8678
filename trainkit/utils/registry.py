"""Find objects by name."""

import difflib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from trainkit.utils.plugins import find_plugins, import_module_of, lending


def is_new_definition(former: Any, new: Any) -> bool:
    """Whether a cell of a notebook, or a line of an interactive session, was executed again."""
    is_interactive = not hasattr(sys.modules["__main__"], "__file__")
    return is_interactive and former.__module__ == new.__module__ == "__main__"


class Registry:
    """Maps names to registered classes or functions, so that a config can name them.

    ``@MODEL_REGISTRY.register()`` before ``class Net`` registers it; ``MODEL_REGISTRY.get("Net")``
    gives it. A name that a project brings is registered by importing the module that the project
    names for it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._objects: dict[str, Any] = {}

    def register(self, obj: Any = None) -> Any:
        """Register an object under its ``__name__``; also as a decorator; in a notebook also again.

        Raises:
            ValueError: another object has the name.
        """
        if obj is None:
            return self.register
        name = obj.__name__
        registered = self._objects.setdefault(name, obj)
        if registered is not obj and not is_new_definition(registered, obj):
            raise ValueError(
                f"{name!r} is already registered in the {self._name} registry, by "
                f"{registered.__module__}.{registered.__qualname__}"
            )
        self._objects[name] = obj
        return obj

    def get(self, name: str) -> Any:
        """The object registered under ``name``. Raises KeyError if there is no such object."""
        if name not in self:
            hint = did_you_mean(name, [*self._objects, *find_plugins().names])
            registered = ", ".join(sorted(self._objects)) or "nothing"
            raise KeyError(
                f"no {name!r} in the {self._name} registry; {hint}registered: {registered}; "
                "projects and modules in IMPORTS have more"
            )
        return self._objects[name]

    def __contains__(self, name: str) -> bool:
        if name in self._objects:
            return True
        if name in find_plugins().names:
            import_module_of(name)
        return name in self._objects

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._objects.items())


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A question that suggests the most similar known name, without regard to case.

    It is empty if no name is similar.
    """
    by_upper = {candidate.upper(): candidate for candidate in known}
    nearest = difflib.get_close_matches(str(name).upper(), by_upper, n=1)
    if not nearest:
        return ""
    return f"did you mean {by_upper[nearest[0]]!r}? "


__getattr__, __dir__ = lending(__name__)
