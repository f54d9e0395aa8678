"""Checks of a saved optimizer state: its settings, and its entry for each parameter.

torch's fused kernels compare no sizes. They would read and write beyond an entry of another shape.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from trainkit.checkpoint.errors import CheckpointError
from trainkit.checkpoint.optimizer_groups import torch_class_of
from trainkit.checkpoint.optimizer_match import REMEDY
from trainkit.utils.periods import is_number

OF_THE_RUN = {"foreach", "fused", "param_names"}
"""Settings that a run keeps: which kernels can be used, and torch's own list of names."""

# entries that torch's optimizers keep as one number
_ONE_VALUE = {"step", "eta", "mu", "mu_product"}
# entries of torch's optimizers that have the shape of their parameter
_LIKE_PARAMETER = {
    "momentum_buffer",
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_inf",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "sum",
    "prev",
    "step_size",
    "ax",
}
# the entries of these have other shapes
_OTHER_SHAPES = (torch.optim.Adafactor, torch.optim.LBFGS)


def check_settings(group: Mapping[str, Any], saved_group: Mapping[str, Any]) -> None:
    """Raises CheckpointError if a saved group is of another kind of optimizer."""
    own = values_at_start(group).keys()
    saved = values_at_start(saved_group).keys()
    for name, value in group.items():
        if name in saved_group and name != "params" and name not in OF_THE_RUN:
            _check_kind(name, value, saved_group[name])
    only_saved = saved - own
    only_own = own - saved
    if only_saved and only_own:  # one alone: another version of torch
        raise CheckpointError(
            f"the optimizer in the checkpoint has {sorted(only_saved)}, this one "
            f"{sorted(only_own)}. {REMEDY}"
        )


def _check_kind(name: str, own: Any, saved: Any) -> None:
    """Raises CheckpointError if a number, or a list of numbers, is none in the checkpoint."""
    fits: bool
    if isinstance(own, int | float | Tensor):
        fits = isinstance(saved, int | float) and saved == saved  # not NaN
        if isinstance(own, bool):
            fits = fits and saved in (False, True)
        fits = fits or (isinstance(saved, Tensor) and saved.numel() == 1)
    elif isinstance(own, tuple | list):
        fits = isinstance(saved, tuple | list) and len(saved) == len(own)
        if fits:
            for own_value, saved_value in zip(own, saved, strict=True):
                _check_kind(name, own_value, saved_value)
    else:
        return
    if not fits:
        raise CheckpointError(f"the setting {name!r} is {saved!r:.80}; here it is {own!r:.80}")


def values_at_start(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group; those with a schedule as at its start."""
    values = {}
    for name, value in group.items():
        if name == "params" or name in OF_THE_RUN or name.startswith("initial_"):
            continue
        first = group.get(f"initial_{name}", value)
        values[name] = first.tolist() if isinstance(first, Tensor) else first
    return values


def check_entries(
    optimizer: Any,
    parameters: Mapping[int, Tensor],
    entries: Mapping[int, Any],
    settings: Mapping[str, Any],
) -> None:
    """Check the entries of a group. Those of an optimizer of torch all have the same keys.

    Args:
        optimizer: the one that updates the group, see `optimizer_of`.
        parameters: position in this run -> parameter of the group.
        entries: position in this run -> saved state of the parameter; some may have none.
        settings: of the saved group.

    Raises:
        CheckpointError: an entry does not fit its parameter, or the entry before it.
    """
    is_of_torch = type(optimizer) is torch_class_of(optimizer)
    may_be_none = settings.get("momentum", 1) == 0
    keys: Collection[str] = ()  # of the first entry that has any
    for position, entry in entries.items():
        _check_entry(optimizer, parameters[position], entry, position, may_be_none)
        if is_of_torch and isinstance(entry, Mapping):
            keys = keys or entry.keys()
            _check_keys(optimizer, entry, keys, position)


def _check_entry(
    optimizer: Any, parameter: Tensor, entry: Any, position: int, may_be_none: bool
) -> None:
    """Compare the values that torch's kernels will use with their parameter.

    Args:
        may_be_none: whether a value may be missing, as momentum that is not used.

    Raises CheckpointError if one does not fit.
    """
    base = torch_class_of(optimizer)
    if base is None:
        return
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"the state of parameter {position} is no dict but {entry!r:.80}")
    if issubclass(base, _OTHER_SHAPES) or is_lazy(parameter):
        return
    has_only_entries_of_torch = type(optimizer) is base
    for name, value in entry.items():
        if isinstance(value, Tensor):
            got = f"shape {list(value.shape)}"
            expected = _accepted_shape(name, value, parameter, has_only_entries_of_torch)
        else:
            got = repr(value)
            expected = _accepted_value(name, value, parameter, may_be_none)
        if expected is not None:
            raise CheckpointError(
                f"the entry {name!r} in the state of parameter {position} "
                f"({base.__name__}) has {got:.80}; accepted: {expected}"
            )


def _accepted_shape(
    name: str, value: Tensor, parameter: Tensor, has_only_entries_of_torch: bool
) -> str | None:
    """The shape that a tensor must have instead; None if its own is right, or not known."""
    if name in _ONE_VALUE:
        return None if value.numel() == 1 else "one value"
    if name not in _LIKE_PARAMETER and not has_only_entries_of_torch:
        return None  # what a subclass has added
    if value.shape == parameter.shape:
        return None
    return f"shape {list(parameter.shape)}, as its parameter"


def _accepted_value(name: str, value: Any, parameter: Tensor, may_be_none: bool) -> str | None:
    """What must replace a value that is no tensor; None if it is right, or not known."""
    if name in _ONE_VALUE:
        return None if is_number(value) else "one number"
    if name not in _LIKE_PARAMETER:
        return None
    if value is None and may_be_none:  # SGD without momentum
        return None
    return f"a tensor of shape {list(parameter.shape)}, as its parameter"


def _check_keys(
    optimizer: Any, entry: Mapping[str, Any], keys: Collection[str], position: int
) -> None:
    """Raises CheckpointError if an entry has other keys than one of the same group.

    An empty entry starts anew.
    """
    if entry and entry.keys() != keys and not isinstance(optimizer, _OTHER_SHAPES):
        raise CheckpointError(
            f"the state of parameter {position} has {sorted(entry)}, that of another one has "
            f"{sorted(keys)}"
        )
