"""Checks for numbers. Bools, which Python accepts as 1 and 0, are no numbers for these functions."""

from typing import TypeGuard


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is an int or a float, also inf or NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object, minimum: int) -> TypeGuard[int]:
    """Whether ``value`` is an int of at least ``minimum``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum
