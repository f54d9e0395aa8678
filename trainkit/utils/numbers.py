"""What counts as a number that somebody gave; True and False, which Python takes for 1 and 0, do not."""

from typing import TypeGuard


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is an int or a float, also one that is not finite."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object, minimum: int) -> TypeGuard[int]:
    """Whether it is an int, and at least ``minimum``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum
