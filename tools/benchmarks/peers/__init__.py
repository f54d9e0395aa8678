"""Other libraries that do the job of the section "step", one per module.

Each module has ``make(folder)``, which returns a function like `benchmarks.job.StepRunner`. The
library fetches the batches, calls forward, backward and update, and steps the schedule. Its
handlers time, check, store and write with the code of `benchmarks.by_hand`, unless the library
has its own way for that.
"""

import importlib
from collections.abc import Callable
from pathlib import Path

PEERS = {
    "Ignite": "ignite",
    "Fabric": "fabric",
    "detectron2's shape": "detectron2",
    "MMEngine": "mmengine",
    "Lightning": "lightning",
}
"""name in the table -> module."""

Maker = Callable[[Path], Callable[[int], float]]


def find(module: str) -> Maker | None:
    """The ``make`` of a module; None if the library is not installed."""
    try:
        make: Maker = importlib.import_module(f"{__name__}.{module}").make
    except ModuleNotFoundError:
        return None
    return make
