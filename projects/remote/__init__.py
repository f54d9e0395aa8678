"""Runs whose folder is an address of fsspec, such as ``s3://bucket/run``."""

from typing import Any

from trainkit.utils.plugins import lent_names, lent_object


def __getattr__(name: str) -> Any:
    return lent_object(__name__, name)


def __dir__() -> list[str]:
    return [*globals(), *lent_names(__name__)]
