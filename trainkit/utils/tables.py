"""Tables for the log."""

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, cast


def format_table(rows: Iterable[Sequence[Any]], headers: Sequence[str] = (), **options: Any) -> str:
    """``tabulate.tabulate(rows, headers, **options)``; tabulate is imported at the first table."""
    return cast(str, importlib.import_module("tabulate").tabulate(rows, headers, **options))
