"""Datasets and facts about them, by name."""

import difflib
from collections.abc import Callable
from typing import Any

__all__ = ["DatasetCatalog", "Metadata", "MetadataCatalog"]


class _DatasetCatalog:
    """Names of datasets, each with the function that makes the dataset.

    A function takes no argument and gives a list of samples, a map-style dataset or an ``IterableDataset``. It must
    give the same samples in the same order whenever it is called: the order of training is made of their indices.
    """

    def __init__(self) -> None:
        self._functions: dict[str, Callable[[], Any]] = {}

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
        if name in self._functions:
            raise ValueError(f"a dataset {name!r} is registered already; remove({name!r}) it first")
        self._functions[name] = func

    def get(self, name: str) -> Any:
        """Call the function registered under ``name`` and give what it gives.

        Raises:
            KeyError: no dataset has that name.
        """
        if name not in self._functions:
            raise KeyError(self.explain_unknown(name))
        return self._functions[name]()

    def list(self) -> list[str]:
        """The registered names, in the order of their registration."""
        return [*self._functions]

    def remove(self, name: str) -> None:
        """Forget a dataset.

        Raises:
            KeyError: no dataset has that name.
        """
        self.pop(name)

    def pop(self, name: str) -> Callable[[], Any]:
        """Forget a dataset and give its function.

        Raises:
            KeyError: no dataset has that name.
        """
        if name not in self._functions:
            raise KeyError(self.explain_unknown(name))
        return self._functions.pop(name)

    def explain_unknown(self, name: str) -> str:
        """The text of the error for a name that is not registered: what is, and what to do."""
        nearest = difflib.get_close_matches(str(name), self._functions, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        return (
            f"no dataset is called {name!r}{hint}; registered: {', '.join(sorted(self._functions)) or 'none'}. "
            "Put the module that registers it into IMPORTS"
        )

    def __contains__(self, name: object) -> bool:
        return name in self._functions

    def __repr__(self) -> str:
        return f"DatasetCatalog({', '.join(self._functions)})"


class Metadata:
    """Facts about a dataset, such as the names of its classes, as attributes that can be set once.

    Setting an attribute again to an equal value is allowed, so that a registration may run twice.
    """

    name: str

    def __init__(self, name: str) -> None:
        self.name = name

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
        return self.__dict__.get(key, default)

    def as_dict(self) -> dict[str, Any]:
        """All attributes, ``name`` included, as a new dict."""
        return dict(self.__dict__)

    def __repr__(self) -> str:
        return f"Metadata({', '.join(f'{key}={value!r}' for key, value in self.__dict__.items())})"


class _MetadataCatalog:
    """One ``Metadata`` per name, made when it is first asked for; the dataset need not be registered."""

    def __init__(self) -> None:
        self._metadata: dict[str, Metadata] = {}

    def get(self, name: str) -> Metadata:
        """The metadata of that name: the same object each time.

        Raises:
            ValueError: the name is empty.
        """
        if not name:
            raise ValueError(f"metadata needs a name that is not empty, got {name!r}; give that of its dataset")
        return self._metadata.setdefault(name, Metadata(name))

    def list(self) -> list[str]:
        """The names that were asked for, in that order."""
        return [*self._metadata]

    def remove(self, name: str) -> None:
        """Forget what is known under a name.

        Raises:
            KeyError: nothing is known under it.
        """
        self.pop(name)

    def pop(self, name: str) -> Metadata:
        """Forget what is known under a name and give it.

        Raises:
            KeyError: nothing is known under it.
        """
        if name not in self._metadata:
            raise KeyError(f"no metadata is called {name!r}; there is: {', '.join(sorted(self._metadata)) or 'none'}")
        return self._metadata.pop(name)

    def __contains__(self, name: object) -> bool:
        return name in self._metadata

    def __repr__(self) -> str:
        return f"MetadataCatalog({', '.join(self._metadata)})"


DatasetCatalog = _DatasetCatalog()
MetadataCatalog = _MetadataCatalog()
