"""Other trainers doing the job of the step rows, one per module; none of them is needed.

Each module is called as the package it imports and has ``make(scratch)``, which gives a function as in
`benchmarks.step.StepRunner`. They are set up as their documentation says: both losses logged where there is a call for
that, the schedule stepped per iteration, a log line every 20 steps, nothing saved. Their batches come as those of the
bare loop, without the cost of a DataLoader.
"""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

Maker = Callable[[Path], Callable[[int], float]]


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> Maker | None:
    """The ``make`` of one of ``names()``; None if the package is not installed."""
    try:
        return importlib.import_module(f"{__name__}.{name}").make
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != name:
            raise
        return None
