"""Checks for numbers, for which the bools are none, and a sum over ranks."""

from typing import Any, TypeGuard


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is an int or a float, also inf or NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object, minimum: int) -> TypeGuard[int]:
    """Whether ``value`` is an int of at least ``minimum``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def tree_sum(parts: Any) -> Any:
    """The sum over the first dimension of an array or a tensor, a power of two of them in one binary tree."""
    while len(parts) % 2 == 0:
        half = len(parts) // 2
        parts = parts[:half] + parts[half:]
    return parts.sum(0)
