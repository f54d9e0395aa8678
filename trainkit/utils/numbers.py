"""Numbers in the types of NumPy and torch."""

from typing import Any

import numpy as np
import torch

_ARRAYS = (np.ndarray, np.generic, torch.Tensor)


def unpack(value: Any) -> Any:
    """The element of an array or a tensor that has one, of any shape; anything else as it is."""
    if isinstance(value, _ARRAYS) and all(length == 1 for length in value.shape):
        return value.item()
    return value


def one_number(value: Any) -> float:
    """A number, or an array or a tensor with one element, as a float; waits for its device.

    Raises:
        TypeError, ValueError: it is something else.
    """
    value = unpack(value)
    if isinstance(value, _ARRAYS):
        raise ValueError(f"its shape is {list(value.shape)}, so it is not one number")
    return float(value)
