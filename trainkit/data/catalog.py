"""Datasets and facts about them, by name."""

import types
from collections import UserDict
from collections.abc import Callable
from typing import Any, TypeVar

from trainkit.utils.registry import did_you_mean

__all__ = ["DatasetCatalog", "Metadata", "MetadataCatalog"]

_T = TypeVar("_T")


class _Catalog(UserDict[str, _T]):
    """A dict from names to entries, in the order in which they were added."""

    def list(self) -> list[str]:
        """The names."""
        return [*self]

    def remove(self, name: str) -> None:
        """Forget an entry, as ``pop`` does.

        Raises:
            KeyError: there is none of that name.
        """
        self.pop(name)

    def explain_unknown(self, name: str) -> str:
        """The text of the error for an unknown name: what there is, and what to do."""
        known = ", ".join(sorted(self)) or "none"
        return (
            f"{type(self).__name__[1:]} has no {name!r}; {did_you_mean(name, self)}registered: {known}. "
            "Put the module that registers it into IMPORTS"
        )

    def __missing__(self, name: str) -> _T:
        raise KeyError(self.explain_unknown(name))

    def __repr__(self) -> str:
        return f"{type(self).__name__[1:]}({', '.join(self)})"


class _DatasetCatalog(_Catalog[Callable[[], Any]]):
    """Names of datasets, each with the function that makes the dataset.

    A function takes no argument and gives a list of samples, a map-style dataset or an ``IterableDataset``. It must
    give the same samples in the same order whenever it is called: the order of training is made of their indices.
    """

    def register(self, name: str, func: Callable[[], Any]) -> None:
        """Make ``func`` the maker of the dataset ``name``; it is not called before the dataset is asked for.

        Raises:
            TypeError: ``func`` cannot be called.
            ValueError: the name is taken.
        """
        if not callable(func):
            raise TypeError(
                f"dataset {name!r} must be registered with a function without arguments that makes it, "
                f"got {type(func).__name__}; wrap it in a function or a lambda"
            )
        if name in self:
            raise ValueError(f"a dataset {name!r} is registered already; remove({name!r}) it first")
        self[name] = func

    def get(self, name: str) -> Any:  # type: ignore[override]
        """Call the function registered under ``name`` and give what it gives.

        Raises:
            KeyError: no dataset has that name.
        """
        return self[name]()


class Metadata(types.SimpleNamespace):
    """Facts about a dataset, such as the names of its classes, as attributes that can be set once.

    Setting an attribute again to an equal value is allowed, so that a registration may run twice.
    """

    name: str = "N/A"

    def __init__(self, name: str | None = None, **attributes: Any) -> None:
        super().__init__(**({} if name is None else {"name": name}), **attributes)

    def __setattr__(self, key: str, value: Any) -> None:
        facts = self.__dict__
        if key in facts and facts[key] is not value and facts[key] != value:
            raise ValueError(
                f"metadata {key!r} of {facts.get('name')!r} is {facts[key]!r} and cannot become {value!r}; "
                f"an attribute is set once: use another dataset name, or MetadataCatalog.remove() this one first"
            )
        facts[key] = value

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):  # what copy and pickle look for
            raise AttributeError(key)
        known = ", ".join(sorted(self.__dict__)) or "none"
        raise AttributeError(f"metadata of {self.__dict__.get('name')!r} has no attribute {key!r}; it has: {known}")

    def set(self, **attributes: Any) -> "Metadata":
        """Set several attributes and give the object itself.

        Raises:
            ValueError: an attribute has another value already.
        """
        for key, value in attributes.items():
            setattr(self, key, value)
        return self

    def get(self, key: str, default: Any = None) -> Any:
        """The attribute, or ``default`` where it was never set."""
        return getattr(self, key, default)

    def as_dict(self) -> dict[str, Any]:
        """All attributes, ``name`` included, as a new dict."""
        return dict(self.__dict__)


class _MetadataCatalog(_Catalog[Metadata]):
    """One ``Metadata`` per name, made when it is first asked for; the dataset need not be registered."""

    def get(self, name: str) -> Metadata:  # type: ignore[override]
        """The metadata of that name: the same object each time.

        Raises:
            ValueError: the name is empty.
        """
        if not name:
            raise ValueError(f"metadata needs a name that is not empty, got {name!r}; give that of its dataset")
        return self.setdefault(name, Metadata(name=name))


DatasetCatalog = _DatasetCatalog()
MetadataCatalog = _MetadataCatalog()
