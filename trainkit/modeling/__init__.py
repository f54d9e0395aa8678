"""Models by name."""

from typing import Any

from trainkit.modeling.build import MODEL_REGISTRY, build_model
from trainkit.utils.plugins import lent_names, lent_object

__all__ = ["MODEL_REGISTRY", "build_model"]


def __getattr__(name: str) -> Any:
    return lent_object(__name__, name)


def __dir__() -> list[str]:
    return [*globals(), *lent_names(__name__)]
