"""What an optimizer's settings were, and what a checkpoint has made of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

_MAX_ROWS = 20


def hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """name -> value of each parameter group; of what a schedule sets, the value that it began with."""
    return [
        {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in ((name, group.get(f"initial_{name}", value)) for name, value in group.items())
            if name != "params" and not name.startswith("initial_")
        }
        for group in optimizer.param_groups
    ]


def describe_changes(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> str:
    """A table of the values that differ; empty if none does."""
    rows = [
        (group, name, old.get(name, "-"), new.get(name, "-"))
        for group, (old, new) in enumerate(zip(before, after, strict=True))
        for name in dict.fromkeys([*old, *new])
        if old.get(name, "-") != new.get(name, "-")
    ]
    if not rows:
        return ""
    left_out = len(rows) - _MAX_ROWS
    text = tabulate(rows[:_MAX_ROWS], headers=("group", "setting", "of this run", "in the checkpoint"))
    return text + (f"\n... and {left_out} more" if left_out > 0 else "")
