"""Find objects by name: registries and dotted paths."""

import contextlib
import difflib
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from trainkit.utils.plugins import NAMES, import_plugin_of


class Registry:
    """Maps names to registered classes or functions, so that a config can name them.

    ``@MODEL_REGISTRY.register()`` before ``class Net`` registers it; ``MODEL_REGISTRY.get("Net")`` gives it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._objects: dict[str, Any] = {}

    def register(self, obj: Any = None) -> Any:
        """Register an object under its ``__name__``; also as a decorator, ``@REGISTRY.register()``.

        Raises:
            ValueError: the name is taken.
        """
        if obj is None:
            return self.register
        name = obj.__name__
        if name in self._objects:
            raise ValueError(
                f"{name!r} is already registered in the {self._name} registry, by {_describe(self._objects[name])}; "
                f"give {_describe(obj)} another name"
            )
        self._objects[name] = obj
        return obj

    def get(self, name: str) -> Any:
        """The object registered under ``name``. Raises KeyError if there is no such object."""
        if name not in self:
            hint, registered = (
                did_you_mean(name, [*self._objects, *NAMES]),
                ", ".join(sorted(self._objects)) or "nothing",
            )
            raise KeyError(
                f"no {name!r} in the {self._name} registry; {hint}registered: {registered or 'nothing'}. "
                "The module that registers it must have been imported: name it in IMPORTS of the config"
            )
        return self._objects[name]

    def build(self, cfg: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Call the object that ``cfg`` names by ``NAME`` or ``type``: ``build({"NAME": "EMAHook", "DECAY": 0.9})``.

        Its other entries are arguments by name, in upper or lower case; they win over ``kwargs``.

        Raises:
            TypeError: ``cfg`` has no name, or the object does not take these arguments.
            KeyError: no object has this name.
        """
        named = [key for key in ("NAME", "type") if isinstance(cfg, Mapping) and isinstance(cfg.get(key), str)]
        if not named:
            raise TypeError(f'build() takes a dict such as {{"NAME": "EMAHook", "DECAY": 0.999}}, got {cfg!r}')
        given = {key.lower(): value for key, value in cfg.items() if key != named[0]}
        return self.get(cfg[named[0]])(*args, **{**kwargs, **given})

    def __contains__(self, name: str) -> bool:
        if name not in self._objects:
            import_plugin_of(name)
        return name in self._objects

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._objects.items())

    def __repr__(self) -> str:
        return f"Registry({self._name}: {', '.join(self._objects)})"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A question that suggests the most similar known name, without regard to case; empty if none is similar."""
    by_upper = {candidate.upper(): candidate for candidate in known}
    nearest = difflib.get_close_matches(str(name).upper(), by_upper, n=1)
    return f"did you mean {by_upper[nearest[0]]!r}? " if nearest else ""


def locate(name: str) -> Any:
    """The object of a dotted path, such as ``"torch.optim.SGD"``; imports the module that holds it.

    Raises:
        ImportError: there is no such module or attribute, or importing the module fails.
    """
    parts = name.split(".")
    if "" in parts:
        raise ImportError(f"cannot locate {name!r}: it is no dotted path; write package.module.object")
    found: Any = None
    for depth, part in enumerate(parts):
        if depth and hasattr(found, part):
            found = getattr(found, part)
        elif depth and not isinstance(found, ModuleType):
            raise ImportError(f"cannot locate {name!r}: {'.'.join(parts[:depth])} has no {part!r}{_hint(part, found)}")
        else:  # the rest may be a module that is not imported yet
            found = _import(".".join(parts[: depth + 1]), name)
    return found


def _convert_target_to_string(t: Any) -> str:
    """The shortest path by which ``locate`` finds a class or function, such as ``"torch.optim.SGD"``."""
    parents = t.__module__.split(".")
    for depth in range(1, len(parents)):
        path = ".".join([*parents[:depth], t.__qualname__])
        with contextlib.suppress(ImportError):
            if locate(path) is t:
                return path
    return _describe(t)


def _import(module_name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # the module's code may raise anything
        parent, _, name = module_name.rpartition(".")
        if not isinstance(error, ModuleNotFoundError) or error.name != module_name:
            reason = f"importing {module_name} failed: {type(error).__name__}: {error}"
        elif parent:
            reason = f"{parent} has no {name!r}{_hint(name, sys.modules[parent])}"
        else:
            reason = f"there is no module {name!r}; install it, or put its folder on PYTHONPATH"
        raise ImportError(f"cannot locate {path!r}: {reason}") from error


def _hint(name: str, owner: object) -> str:
    nearest = did_you_mean(name, dir(owner)).rstrip()
    return f"; {nearest}" if nearest else "; correct the path"


def _describe(obj: Any) -> str:
    return f"{obj.__module__}.{obj.__qualname__}"
