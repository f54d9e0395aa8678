"""The largest size of a batch for which the memory is enough."""

import gc
from collections.abc import Callable

import torch

from trainkit.utils.device import accelerator_runs_ahead

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def has_room(make_steps: Callable[[], object]) -> bool:
    """Whether the memory is enough for a call; its other errors are raised."""
    gc.collect()  # trainers are in reference cycles
    if accelerator_runs_ahead():
        torch.accelerator.memory.empty_cache()
        torch.accelerator.memory.reset_peak_memory_stats()
    try:
        make_steps()
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        is_full = isinstance(error, MemoryError) or any(each in text for each in _OUT_OF_MEMORY)
        if not is_full:
            raise
        return False
    return True


def search(fits: Callable[[int], bool], start: int, limit: Callable[[], int]) -> int:
    """The largest size that fits, found within an eighth of it; 0 if not even one sample fits.

    Args:
        limit: called after each size; larger sizes than its result are not tried.
    """
    low = 0  # the largest size that fits
    high = 0  # the smallest size that does not fit, 0 if there is none yet
    size = start
    while not high or high - low > max(1, low // 8):
        if fits(size):
            low = size
        else:
            high = size
        if not high and low >= limit():
            break
        size = (low + high) // 2 if high else min(2 * low, limit())
    return low
