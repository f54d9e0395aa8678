"""The hyper-parameters of an optimizer, and their changes by a checkpoint."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from trainkit.config.errors import ConfigError
from trainkit.utils.tables import format_table

_MAX_ROWS = 20


def hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """name -> value of each parameter group; for a scheduled value, its first value."""
    return [
        {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in ((name, group.get(f"initial_{name}", value)) for name, value in group.items())
            if name != "params" and not name.startswith("initial_")
        }
        for group in optimizer.param_groups
    ]


def learning_rates(optimizer: Any) -> list[Any]:
    """The learning rate of each parameter group; a tensor is copied, since a schedule changes it in place."""
    groups = getattr(optimizer, "param_groups", ())  # a wrapper may have no groups
    return [rate if type(rate := group.get("lr")) is not Tensor else rate.clone() for group in groups]


def check_saved_groups(saved: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer can load saved groups; torch itself fails later, with a plain ``KeyError``.

    Raises:
        ConfigError: the saved parameter groups are of another kind of optimizer, or their number differs.
    """
    remedy = (
        "resume with the SOLVER settings of that run, or leave out --resume and set MODEL.WEIGHTS to its checkpoint"
    )
    if len(saved) != len(optimizer.param_groups):
        raise ConfigError(
            f"the optimizer in the checkpoint has {len(saved)} parameter groups, that of this run has "
            f"{len(optimizer.param_groups)}; {remedy}"
        )
    groups = iter(saved)
    for part in getattr(optimizer, "optimizers", [optimizer]):
        first, *_ = islice(groups, len(part.param_groups))
        options = [name for name in first if name != "params" and not name.startswith("initial_")]
        without = [name for name in options if name not in part.param_groups[0]]
        instead = [name for name in getattr(part, "defaults", ()) if name not in first]
        if without and instead:  # if only one is set, torch has another version; a wrapper may have no defaults
            raise ConfigError(
                f"the optimizer in the checkpoint has {', '.join(without)}, {type(part).__name__} has "
                f"{', '.join(instead)} instead; {remedy}"
            )


def describe_changes(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> str:
    """A table of the values that differ; empty if all are equal."""
    rows = [
        (group, name, old.get(name, "-"), new.get(name, "-"))
        for group, (old, new) in enumerate(zip(before, after, strict=True))
        for name in dict.fromkeys([*old, *new])
        if old.get(name, "-") != new.get(name, "-")
    ]
    headers = ("group", "setting", "of this run", "in the checkpoint")
    return format_table(rows, headers, max_rows=_MAX_ROWS) if rows else ""
