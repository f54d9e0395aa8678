"""Tables for the log."""

import importlib
from collections.abc import Iterable, Sequence
from typing import Any


def format_table(
    rows: Iterable[Sequence[Any]], headers: Sequence[str] = (), *, max_rows: int | None = None, **options: Any
) -> str:
    """``tabulate.tabulate(rows, headers, **options)`` of the first rows; imports tabulate when called."""
    rows = list(rows)
    text: str = importlib.import_module("tabulate").tabulate(rows[:max_rows], headers, **options)
    return text if max_rows is None or len(rows) <= max_rows else f"{text}\n... and {len(rows) - max_rows} more"
