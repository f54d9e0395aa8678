"""Random states for samples, from a seed and the position in the stream."""

import gc
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1
_NAMES_RANDOM = re.compile(
    r"\.random\b|\brandom\.\w|\b(import|from)\b.*\brandom\b"
)  # not "at random" in a text
_NEVER_READ = {*sys.stdlib_module_names, "numpy", "torch", "trainkit"} - {"__main__"}


def splitmix64(state: int, n: int) -> int:
    """The ``n``-th number of 64 bits of the SplitMix64 generator with this start state; no number comes twice.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    z = (state + (n + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def seed_globals(number: int, only_torch: bool = False) -> None:
    """Seed the global generators of torch's CPU (1 us), and of Python and NumPy (4 us), with 64 random bits."""
    torch.default_generator.manual_seed(
        number & 0xFFFFFFFF
    )  # torch.manual_seed would seed all devices
    if not only_torch:
        random.seed(number)
        np.random.seed(number >> 32)  # with the bits of torch, both would draw the same numbers


@contextmanager
def undisturbed_globals(only_torch: bool = False) -> Iterator[None]:
    """Context that at its end restores the global generators of torch's CPU (1 us), and of Python and NumPy (55 us)."""
    torch_state = torch.get_rng_state()
    others = None if only_torch else (random.getstate(), np.random.get_state())
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        if others is not None:
            random.setstate(others[0])
            np.random.set_state(others[1])


def draws_from_torch_alone(*parts: Any) -> bool:
    """Whether the modules of these objects, of what they hold, and what those modules import never name ``random``.

    The standard library, torch, NumPy and trainkit are not read. A module without source counts as one that names it.
    """
    todo, seen = [*parts], set[int]()
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, type | FunctionType):
            todo += [
                sys.modules.get(part.__module__),
                *gc.get_referents(getattr(part, "__closure__", None)),
            ]
        elif not isinstance(part, ModuleType):
            todo += gc.get_referents(part)[:100]  # of a long list of samples, the first ones
        elif part.__name__.partition(".")[0] not in _NEVER_READ:
            if _names_random(part):
                return False
            todo += [
                value
                for value in vars(part).values()
                if isinstance(value, type | FunctionType | ModuleType)
            ]
    return True


@cache
def _names_random(module: ModuleType) -> bool:
    try:
        file = Path(
            module.__file__ or ""
        )  # not inspect.getsource, which keeps all sources in memory
        return (
            file.suffix != ".py"
            or _NAMES_RANDOM.search(file.read_text("utf-8", "ignore")) is not None
        )
    except (OSError, AttributeError):
        return True
