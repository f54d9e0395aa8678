"""The step as a static graph, for models that are small for their GPU."""

from typing import Any

from trainkit.utils.plugins import lent_names, lent_object


def __getattr__(name: str) -> Any:
    return lent_object(__name__, name)


def __dir__() -> list[str]:
    return [*globals(), *lent_names(__name__)]
