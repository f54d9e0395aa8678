"""The hyper-parameters of an optimizer, and their changes by a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainkit.config.errors import ConfigError
from trainkit.utils.tables import format_table


def hyper_parameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """name -> value of each parameter group; for a scheduled value, its first value."""
    return [
        {
            name: value.tolist() if isinstance(value := group.get(f"initial_{name}", group[name]), Tensor) else value
            for name in group
            if name != "params" and not name.startswith("initial_")
        }
        for group in optimizer.param_groups
    ]


def learning_rates(optimizer: Any) -> list[Any]:
    """The learning rate of each parameter group; a tensor is copied, since a schedule changes it in place."""
    groups = getattr(optimizer, "param_groups", ())  # a wrapper may have no groups
    return [rate if type(rate := group.get("lr")) is not Tensor else rate.clone() for group in groups]


def check_saved_groups(saved: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
    """Raises ConfigError if saved groups are of another kind of optimizer, or their number differs."""
    if len(saved) != len(optimizer.param_groups):
        raise ConfigError(f"the checkpoint has {len(saved)} parameter groups, this run {len(optimizer.param_groups)}")
    for old, new in zip(saved, optimizer.param_groups, strict=True):
        without, instead = ({name for name in a if name not in b} for a, b in ((old, new), (new, old)))
        if without - {"initial_lr"} and instead - {"initial_lr"}:  # if only one is set, torch has another version
            raise ConfigError(f"the optimizer in the checkpoint has {sorted(without)}, this one {sorted(instead)}")


def describe_changes(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> str:
    """A table of the values that differ; empty if all are equal."""
    rows = [
        (group, name, old.get(name, "-"), new.get(name, "-"))
        for group, (old, new) in enumerate(zip(before, after, strict=True))
        for name in dict.fromkeys([*old, *new])
        if old.get(name, "-") != new.get(name, "-")
    ]
    headers = ("group", "setting", "of this run", "in the checkpoint")
    return format_table(rows, headers, max_rows=20) if rows else ""
