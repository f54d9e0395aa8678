"""The result of a replay, as tables and as JSON."""

import fnmatch
import math
from collections.abc import Sequence
from typing import Any

from trainkit.projects.replay.result import Replay, shortened

from trainkit.utils.logger import format_table

_MAX_ROWS = 40  # rows of a table
_WIDTH = 44  # characters of a name


def as_dict(found: Replay) -> dict[str, Any]:
    """The result as plain values, for JSON."""
    facts = ["run", "iteration", "start", "differences", "error", "findings", "failure", "samples_at_fault"]
    facts += ["on_the_way", "proof", "verdict", "samples", "first_bad_module", "bad_samples"]
    return {
        **{name: getattr(found, name) for name in facts},
        "batch": [field._asdict() for field in found.inspection.fields()],
        "losses": {name: loss.item() for name, loss in found.losses.items()},
        "modules": [output._asdict() for output in found.activations],
        "parameters": [update._asdict() for update in found.inspection.updates],
    }


def as_text(found: Replay, pattern: str = "") -> str:
    """The result as tables, at most 100 characters wide.

    Args:
        pattern: which modules and parameters to show, such as ``layers.*``; "": the first rows of each table.
    """
    done = found.iteration - found.first_iteration
    way = f", from {found.start} and {done} iterations after it" if not found.failure else ""
    lines = [f"Iteration {found.iteration} of {found.run}{way}", ""]
    lines += [f"not as in the run: {text}" for text in found.differences] or [
        "settings, code, versions and machine are as in the run"
    ]
    for table in _tables(found, pattern or "*"):
        lines += ["", table]
    lines.append("")
    for rank, faults in enumerate(found.findings):
        lines += [f"rank {rank}:"] if faults and len(found.findings) > 1 else []
        lines += [f"{name}: {text}" for name, text in faults.items()]
    checks = {"failure": found.failure, "samples": found.samples_at_fault, "on the way": found.on_the_way}
    checks |= {"proof": found.proof, "verdict": found.verdict}
    return "\n".join([*lines, *(f"{name}: {text}" for name, text in checks.items() if text)])


def _tables(found: Replay, pattern: str) -> list[str]:
    batch = [
        (_cut(field.name), str(field.shape), field.dtype, _number(field.minimum), _number(field.maximum))
        for field in found.inspection.fields()
    ]
    losses = [(name, _number(loss.item())) for name, loss in found.losses.items()]
    modules = [
        (_cut(row.module), *map(_number, row[1:5]), _flag(row.is_finite))
        for row in found.activations
        if row.mean is not None and fnmatch.fnmatchcase(row.module, pattern)
    ]
    parameters = [
        (_cut(row.parameter), _number(row.grad_norm), _number(row.ratio), _flag(row.grad_is_finite))
        for row in found.inspection.updates
        if fnmatch.fnmatchcase(row.parameter, pattern)
    ]
    tables = [
        _table(batch, ("batch", "shape", "dtype", "min", "max"), 12),
        _table(losses, ("loss", "value")),
        _table(modules, ("module", "mean", "std", "max abs", "zeros %", "")),
        _table(parameters, ("parameter", "gradient's norm", "update / weights", "")),
    ]
    if found.samples:
        tables.insert(1, f"{len(found.samples)} samples: {shortened(found.samples)}")
    return tables


def _flag(is_finite: bool) -> str:
    return "" if is_finite else "NOT FINITE"


def _table(rows: Sequence[Sequence[str]], headers: Sequence[str], max_rows: int = _MAX_ROWS) -> str:
    return format_table(rows, headers, max_rows=max_rows, disable_numparse=True)


def _cut(name: str) -> str:
    return name if len(name) <= _WIDTH else f"...{name[3 - _WIDTH :]}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if math.isfinite(value) else str(value)
