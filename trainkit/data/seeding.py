"""Random states for samples, from a seed and the position in the stream."""

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

_MASK = (1 << 64) - 1


def splitmix64(state: int, n: int) -> int:
    """The ``n``-th number (from 0) of the SplitMix64 generator with this start state: 64 bits, each different.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), with the constants of
    Vigna's splitmix64.c.
    """
    z = (state + (n + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def seed_globals(number: int) -> None:
    """Seed the global generators of Python, NumPy and torch's CPU with 64 random bits; takes about 6 us.

    ``torch.manual_seed`` would seed all devices, and take 20 times as long.
    """
    random.seed(number)
    # half of the bits each: both use the same algorithm with 32 bits, and would draw the same numbers
    torch.default_generator.manual_seed(number & 0xFFFFFFFF)
    np.random.seed(number >> 32)


@contextmanager
def undisturbed_globals() -> Iterator[None]:
    """At the end restore the global generators of Python, NumPy and torch's CPU; takes about 50 us.

    Not needed in a loader worker. See `trainkit.utils.rng` for devices.
    """
    python_state, torch_state = random.getstate(), torch.default_generator.get_state()
    numpy_state, bit_generator = np.random.get_state(legacy=False), get_bit_generator()
    set_bit_generator(_spare_bit_generator())  # swapping generators is free, setting a state takes 35 us
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.default_generator.set_state(torch_state)
        set_bit_generator(bit_generator)
        # swapping loses the second of a pair of normal numbers; a nested block has changed the spare generator
        if numpy_state["has_gauss"] or bit_generator is _spare_bit_generator():
            np.random.set_state(numpy_state)


@functools.cache
def _spare_bit_generator() -> np.random.MT19937:
    return np.random.MT19937(0)  # creating it takes 150 us
