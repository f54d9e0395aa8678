"""Datasets by name."""

from collections import UserDict
from collections.abc import Callable
from typing import Any, TypeVar

from trainkit.utils.plugins import lending
from trainkit.utils.registry import did_you_mean, is_new_definition

__all__ = ["DatasetCatalog"]

__getattr__, __dir__ = lending(__name__)


_T = TypeVar("_T")


class Catalog(UserDict[str, _T]):
    """A dict from names to entries, in the order of registration."""

    def list(self) -> list[str]:
        return [*self]

    def remove(self, name: str) -> None:
        self.pop(name)

    def explain_unknown(self, name: str) -> str:
        known = f"registered: {', '.join(sorted(self)) or 'none'}, and modules in IMPORTS may add"
        return f"{type(self).__name__[1:]} has no {name!r}; {did_you_mean(name, self)}{known}"

    def __missing__(self, name: str) -> _T:
        raise KeyError(self.explain_unknown(name))


class _DatasetCatalog(Catalog[Callable[[], Any]]):
    """Names of datasets, each with the function that makes it.

    It makes a list, a map-style dataset or an ``IterableDataset``. Each call must give the same
    samples in the same order, since the training order consists of indices.
    """

    def register(self, name: str, func: Callable[[], Any]) -> None:
        """Register the function that makes the dataset ``name``; in a notebook also again.

        Raises:
            ValueError: the name is taken.
        """
        if name in self and not is_new_definition(self[name], func):
            raise ValueError(
                f"a dataset {name!r} is registered already; to replace it, call "
                f"DatasetCatalog.remove({name!r}) first"
            )
        self[name] = func

    def get(self, name: str) -> Any:  # type: ignore[override]
        """Make the dataset ``name``. Raises KeyError if no dataset has that name."""
        return self[name]()


DatasetCatalog = _DatasetCatalog()
