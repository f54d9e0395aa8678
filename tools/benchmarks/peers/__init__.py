"""Other trainers that do the job of the step rows, one per module; none of them has to be installed.

Each module has the name of the package that it imports, and ``make(scratch)``, which returns a function like
`benchmarks.step.StepRunner`. They are set up as their documentation says: both losses are logged if there is a call for
that, the schedule steps per iteration, there is a log line every 20 steps, and nothing is saved. They get their batches
like the bare loop, without the cost of a DataLoader.
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
