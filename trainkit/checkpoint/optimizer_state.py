"""Load the state of an optimizer, which is given to the parameters of the same names.

A checkpoint holds ``optimizer.state_dict()`` and the description of `optimizer_groups`. Saved
groups are brought into the order of this run (`optimizer_match`). A state that does not fit is an
error before the optimizer sees it (`optimizer_checks`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.checkpoint.errors import CheckpointError
from trainkit.checkpoint.optimizer_checks import (
    OF_THE_RUN,
    check_entries,
    check_settings,
    values_at_start,
)
from trainkit.checkpoint.optimizer_groups import describe_groups, optimizer_of
from trainkit.checkpoint.optimizer_match import SavedGroup, match_groups, read_groups
from trainkit.utils.logger import format_table

_logger = logging.getLogger(__name__)


def load_optimizer(
    optimizer: Any,
    state: Mapping[str, Any],
    saved: Sequence[Mapping[str, Any]],
    names: Mapping[str, Tensor],
    adapt: Callable[[Any, Any], Any] | None = None,
) -> None:
    """Load a saved state; its hyper-parameters replace those of this run.

    The log has a table of the differences.

    Args:
        optimizer, state, saved, names: as in `fit_state`, which names the errors.
        adapt: called with the fitting state and the optimizer; returns what is loaded, such as
            sharded tensors.
    """
    fitting = fit_state(optimizer, state, saved, names)
    if fitting is state:
        optimizer.load_state_dict(state)
        return
    changes = _compare_values(optimizer.param_groups, fitting["param_groups"])
    own_values = [_values_of_the_run(group) for group in optimizer.param_groups]
    if adapt is not None:
        fitting = adapt(fitting, optimizer)
    optimizer.load_state_dict(fitting)
    for group, own in zip(optimizer.param_groups, own_values, strict=True):
        for name in OF_THE_RUN:
            if name not in own:
                group.pop(name, None)
        group.update(own)  # in their places: the order of the settings stays
    _lay_out_like_parameters(optimizer)
    if changes:
        _logger.warning(
            "The optimizer uses the values of the checkpoint, not of this run:\n%s", changes
        )


def fit_state(
    optimizer: Any,
    state: Mapping[str, Any],
    saved: Sequence[Mapping[str, Any]],
    names: Mapping[str, Tensor],
) -> Mapping[str, Any]:
    """The saved ``state`` in the order of the optimizer's groups and parameters.

    Nothing is changed, so this is also the check before anything is loaded. An optimizer without
    ``param_groups``, or a wrapper with a state of its own kind, gets ``state`` itself.

    Args:
        saved: what `describe_groups` gave at the save; [] (as in files of detectron2): the places
            count.
        names: of this run, see `names_in`.

    Raises:
        CheckpointError: the optimizer is of another class; parameters, groups or shapes differ.
    """
    if getattr(optimizer, "param_groups", None) is None:
        return state
    if "param_groups" not in state and not isinstance(optimizer, Optimizer):
        return state
    try:
        own = describe_groups(optimizer, names)
        matching = match_groups(own, read_groups(state, saved), names)
        return _number_by_position(optimizer, state, matching)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the state of the optimizer is damaged ({reason})") from error


def _number_by_position(
    optimizer: Any, state: Mapping[str, Any], matching: Sequence[SavedGroup]
) -> dict[str, Any]:
    """The state for ``load_state_dict``: a parameter's key is its position in this run.

    Args:
        matching: the saved groups in the order of the optimizer's groups and parameters.
    """
    remaining = dict(state["state"])  # place in the saved state -> entry
    fitted_groups = []
    fitted_entries: dict[Any, Any] = {}
    position = 0
    for group, saved_group in zip(optimizer.param_groups, matching, strict=True):
        check_settings(group, saved_group.values)
        parameters = {}
        entries = {}
        for parameter, place in zip(group["params"], saved_group.places, strict=True):
            parameters[position] = parameter
            if place in remaining:
                entries[position] = remaining.pop(place)
            position += 1
        check_entries(optimizer_of(optimizer, group), parameters, entries, saved_group.values)
        fitted_entries.update(entries)
        values = {**saved_group.values, "params": list(parameters)}
        for name, value in group.items():  # a newer version of torch may have more settings
            values.setdefault(name, value)
        fitted_groups.append(values)
    for key, value in remaining.items():
        if not isinstance(key, int):  # values of the optimizer as a whole
            fitted_entries[key] = value
    return {**state, "param_groups": fitted_groups, "state": fitted_entries}


def _values_of_the_run(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name in OF_THE_RUN}


def _lay_out_like_parameters(optimizer: Any) -> None:
    """Give states the memory format of their parameters, which fused kernels assume."""
    states = getattr(optimizer, "state", {})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = states.get(parameter, {})
            for name, value in entry.items():
                if not isinstance(value, Tensor) or value.layout is not torch.strided:
                    continue
                if value.shape == parameter.shape and value.stride() != parameter.stride():
                    like_parameter = torch.empty_like(parameter, dtype=value.dtype)
                    entry[name] = like_parameter.copy_(value)


def _compare_values(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> str:
    """A table of the values that differ, at the start of their schedules; "" if none does."""
    rows = []
    for number, (group, saved_group) in enumerate(zip(groups, saved, strict=True)):
        saved_values = values_at_start(saved_group)
        for name, value in values_at_start(group).items():
            saved_value = saved_values.get(name, value)
            if value != saved_value:
                rows.append((number, name, value, saved_value))
    if not rows:
        return ""
    headers = ("group", "setting", "of this run", "in the checkpoint")
    return format_table(rows, headers, max_rows=20)
