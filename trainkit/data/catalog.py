"""Datasets and their metadata, by name."""

import types
from collections import UserDict
from collections.abc import Callable
from typing import Any, TypeVar

from trainkit.utils.registry import did_you_mean

__all__ = ["DatasetCatalog", "Metadata", "MetadataCatalog"]

_T = TypeVar("_T")


class _Catalog(UserDict[str, _T]):
    """A dict from names to entries, in the order of registration."""

    def list(self) -> list[str]:
        return [*self]

    def remove(self, name: str) -> None:
        self.pop(name)

    def explain_unknown(self, name: str) -> str:
        known, catalog = ", ".join(sorted(self)) or "none", type(self).__name__[1:]
        remedy = "Put the module that registers it into IMPORTS"
        return f"{catalog} has no {name!r}; {did_you_mean(name, self)}registered: {known}. {remedy}"

    def __missing__(self, name: str) -> _T:
        raise KeyError(self.explain_unknown(name))

    def __repr__(self) -> str:
        return f"{type(self).__name__[1:]}({', '.join(self)})"


class _DatasetCatalog(_Catalog[Callable[[], Any]]):
    """Names of datasets, each with the function that makes it: a list, a map-style dataset or an ``IterableDataset``.

    Each call must give the same samples in the same order, since the training order consists of indices.
    """

    def register(self, name: str, func: Callable[[], Any]) -> None:
        """Register the function that makes the dataset ``name``. Raises ValueError if the name is taken."""
        if not callable(func):
            raise TypeError(f"dataset {name!r} needs a function that makes it, got a {type(func).__name__}")
        if name in self:
            raise ValueError(f"a dataset {name!r} is registered already; remove({name!r}) it first")
        self[name] = func

    def get(self, name: str) -> Any:  # type: ignore[override]
        """Make the dataset ``name``. Raises KeyError if no dataset has that name."""
        return self[name]()


class Metadata(types.SimpleNamespace):
    """Facts about a dataset, such as its class names, as attributes that are set once (or again to an equal value)."""

    name: str = "N/A"

    def __init__(self, name: str | None = None, **attributes: Any) -> None:
        super().__init__(**({} if name is None else {"name": name}), **attributes)

    def __setattr__(self, key: str, value: Any) -> None:
        known = self.__dict__.setdefault(key, value)
        if known is not value and known != value:
            raise ValueError(f"metadata {key!r} of {self.name!r} is {known!r} and cannot become {value!r}")

    def __getattr__(self, key: str) -> Any:
        known = ", ".join(sorted(self.__dict__)) or "none"
        raise AttributeError(f"metadata of {self.name!r} has no attribute {key!r}; it has: {known}")

    def set(self, **attributes: Any) -> "Metadata":
        """Set several attributes; return the object itself."""
        for key, value in attributes.items():
            setattr(self, key, value)
        return self

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)

    def as_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


class _MetadataCatalog(_Catalog[Metadata]):
    """One `Metadata` per name, created when first used; the dataset need not be registered."""

    def get(self, name: str) -> Metadata:  # type: ignore[override]
        return self.setdefault(name, Metadata(name=name))


DatasetCatalog = _DatasetCatalog()
MetadataCatalog = _MetadataCatalog()
