"""The place of names that projects lend."""

from typing import Any

from trainkit.utils.plugins import lent_names, lent_object


def __getattr__(name: str) -> Any:
    return lent_object(__name__, name)


def __dir__() -> list[str]:
    return [*globals(), *lent_names(__name__)]
