"""The time of the import."""

import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import Row, alternate

HEAVY = ("tensorboard", "matplotlib", "omegaconf")  # optional packages that are slow to import

_SCRIPT = f"""
import sys, time
begin = time.perf_counter()
import torch
torch_sec, begin = time.perf_counter() - begin, time.perf_counter()
from trainkit.engine import SimpleTrainer
engine_sec = time.perf_counter() - begin
print(torch_sec, engine_sec, *[name for name in {HEAVY} if name in sys.modules])
"""

_ROOT = Path(__file__).resolve().parents[2]


def imports(rounds: int = 9, *, scratch: Path) -> list[Row]:
    """``from trainkit.engine import SimpleTrainer`` after ``import torch``, each time in a new interpreter.

    The import uses bytecode; if it is missing, the first round writes it. This round does not count.
    """
    torch_secs, heavy = [], set()
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }

    def import_both() -> float:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            cwd=_ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        torch_sec, engine_sec, *found = done.stdout.split()
        torch_secs.append(float(torch_sec))
        heavy.update(found)
        return float(engine_sec)

    name = "import SimpleTrainer"
    engine_sec = statistics.median(alternate({name: import_both}, rounds)[name])
    sides = {"import torch before it": statistics.median(torch_secs[1:])}
    loaded = ", ".join(sorted(heavy))
    return [
        Row(name, engine_sec, 0.1, "s", sides=sides),
        Row(f"{', '.join(HEAVY)} in its sys.modules", len(heavy), 0, "modules", note=loaded),
    ]
