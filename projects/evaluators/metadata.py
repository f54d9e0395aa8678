"""Facts about datasets, by name, such as the names of their classes."""

import types
from typing import Any

from trainkit.data.catalog import Catalog


class Metadata(types.SimpleNamespace):
    """Facts about a dataset, such as its class names, as attributes that are set once (or again to an equal value)."""

    name: str = "N/A"

    def __init__(self, name: str | None = None, **attributes: Any) -> None:
        super().__init__(**({} if name is None else {"name": name}), **attributes)

    def __setattr__(self, key: str, value: Any) -> None:
        known = self.__dict__.setdefault(key, value)
        if known is not value and known != value:
            raise ValueError(f"metadata {key!r} of {self.name!r} is {known!r} and cannot become {value!r}")

    def set(self, **attributes: Any) -> "Metadata":
        for key, value in attributes.items():
            setattr(self, key, value)
        return self

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)

    def as_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


class _MetadataCatalog(Catalog[Metadata]):
    """One `Metadata` per name, created when first used; the dataset need not be registered."""

    def get(self, name: str) -> Metadata:  # type: ignore[override]
        return self.setdefault(name, Metadata(name=name))


MetadataCatalog = _MetadataCatalog()
