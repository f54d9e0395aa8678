"""Checks for numbers; bools, which Python accepts as 1 and 0, are not numbers here."""

from typing import TypeGuard


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is an int or a float; inf and NaN count."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object, minimum: int) -> TypeGuard[int]:
    """Whether it is an int of at least ``minimum``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum
