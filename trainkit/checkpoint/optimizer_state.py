"""The state of an optimizer in a checkpoint, which is given to the parameters of the same names.

``optimizer.state_dict()`` knows parameters only by their places. So a checkpoint also holds, for
each group, the class of the optimizer, and the names and the global shapes of the parameters. A
state that does not fit is an error before the optimizer sees it: torch's fused kernels compare no
sizes, and would read and write beyond a state of another shape.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainkit.checkpoint.atomic import CheckpointError
from trainkit.utils.logger import format_table
from trainkit.utils.periods import is_number

_logger = logging.getLogger(__name__)

Groups = list[dict[str, Any]]
"""For each parameter group: ``optimizer``, ``names`` and ``shapes``."""

_WRAPPERS = {"module", "_orig_mod"}  # of DistributedDataParallel and torch.compile
# the start of the name of a parameter that is in none of the modules; a number follows
_UNNAMED = "#"

# of the run, not of its checkpoint: which kernels can be used, and torch's own list of names
_OF_THE_RUN = {"foreach", "fused", "param_names"}

# entries that torch's optimizers keep as one number
_ONE_VALUE = {
    "step",
    "eta",
    "mu",
    "mu_product",
}
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

_REMEDY = (
    "Resume with the same model and optimizer, or start a new run from the weights (MODEL.WEIGHTS)"
)


# ---------------------------------------------------------------------- names


def names_in(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """name -> parameter; a tied parameter is there under all its names.

    The names have no ``module.`` and ``_orig_mod.``, unless two parameters would get one name.

    Args:
        modules: prefix of the names ("" or "generator.") -> module.
    """
    found: dict[str, Tensor] = {}
    for prefix, module in modules.items():
        named = dict(module.named_parameters(remove_duplicate=False))
        plain = {_without_wrappers(name): parameter for name, parameter in named.items()}
        if len(plain) < len(named):
            plain = named
        for name, parameter in plain.items():
            found[prefix + name] = parameter
    return found


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def describe_groups(optimizer: Any, names: Mapping[str, Tensor]) -> Groups:
    """What a checkpoint holds beside ``optimizer.state_dict()``.

    [] if the optimizer has no ``param_groups``.
    """
    first_names = _first_names(names)
    groups: Groups = []
    num_unnamed = 0
    for group in getattr(optimizer, "param_groups", ()):
        own_names = []
        for parameter in group["params"]:
            name = first_names.get(id(parameter))
            if name is None:
                name = f"{_UNNAMED}{num_unnamed}"
                num_unnamed += 1
            own_names.append(name)
        shapes = [_shape_of(parameter) for parameter in group["params"]]
        kind = _class_name(_optimizer_of(optimizer, group))
        groups.append({"optimizer": kind, "names": own_names, "shapes": shapes})
    return groups


def _first_names(names: Mapping[str, Tensor]) -> dict[int, str]:
    """``id`` of a parameter -> the first of its names."""
    first_names: dict[int, str] = {}
    for name, parameter in names.items():
        first_names.setdefault(id(parameter), name)
    return first_names


def _shape_of(parameter: Tensor) -> list[int] | None:
    """The global shape; None if it is not known before the first forward pass."""
    return None if is_lazy(parameter) else list(parameter.shape)


def _optimizer_of(optimizer: Any, group: Mapping[str, Any]) -> Any:
    """The optimizer that updates the group: itself, or one that it is made of.

    The attributes ``optimizers`` and ``optimizer`` hold these.
    """
    parts = [*getattr(optimizer, "optimizers", ()), getattr(optimizer, "optimizer", None)]
    for part in parts:
        for part_group in getattr(part, "param_groups", ()):
            if part_group is group:
                return _optimizer_of(part, group)
    return optimizer


def _torch_class(optimizer: Any) -> type | None:
    """torch's own class of an optimizer, such as AdamW; None if it is not derived from one."""
    for each in type(optimizer).__mro__:
        if each is not Optimizer and each.__module__.startswith("torch.optim."):
            return each
    return None


def _class_name(optimizer: Any) -> str:
    """The class that decides what the state holds; "" if it is not known.

    A subclass of it, such as one that clips, has the same state.
    """
    torch_class = _torch_class(optimizer)
    if torch_class is not None:
        return torch_class.__name__
    if not isinstance(optimizer, Optimizer):
        return ""
    # the last one is torch's Optimizer itself
    optimizer_classes = [each for each in type(optimizer).__mro__ if issubclass(each, Optimizer)]
    if len(optimizer_classes) == 1:
        return ""
    return optimizer_classes[-2].__name__


# ---------------------------------------------------------------------- fitting a saved state


def fit_state(
    optimizer: Any,
    state: Mapping[str, Any],
    saved: Sequence[Mapping[str, Any]],
    names: Mapping[str, Tensor],
) -> Mapping[str, Any]:
    """The saved ``state`` in the order of the optimizer's groups and parameters.

    Nothing is changed.

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
        return state  # a wrapper with a state of its own kind
    try:
        own = describe_groups(optimizer, names)
        saved_groups = _saved_groups(state, saved)
        _check_classes(own, saved_groups)
        _rename_tied(saved_groups, names)
        if _can_match_names(own, saved_groups):
            fitting = _in_order_of_names(own, saved_groups)
        else:
            _check_sizes(own, saved_groups)
            fitting = saved_groups
        for own_group, saved_group in zip(own, fitting, strict=True):
            _check_classes([own_group], [saved_group])
            _check_parameter_shapes(own_group, saved_group)
        return _number_by_position(optimizer, state, fitting)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the state of the optimizer is damaged ({reason})") from error


class _SavedGroup:
    """A group of the checkpoint.

    Attributes:
        values: the group in the saved ``param_groups``.
        places: of its parameters in the saved state; ``names`` and ``shapes`` are in the same
            order.
        names: None: not known.
        shapes: None: not known, for each parameter.
        optimizer: the name of its class; "": not known.
    """

    def __init__(self, values: Mapping[str, Any], description: Mapping[str, Any] | None) -> None:
        self.values = values
        self.places = list(values["params"])
        self.names: list[str] | None = None
        self.shapes: list[Any] = [None] * len(self.places)
        self.optimizer = ""
        if description is not None:
            self.names = [str(name) for name in description["names"]]
            self.shapes = list(description["shapes"])
            self.optimizer = str(description["optimizer"])
            if not len(self.names) == len(self.shapes) == len(self.places):
                raise ValueError(
                    f"a group has {len(self.places)} parameters, {len(self.names)} names and "
                    f"{len(self.shapes)} shapes"
                )

    def reorder(self, names: Sequence[str]) -> None:
        """Put the parameters into the order of these names, which are its own."""
        index_of = {name: i for i, name in enumerate(self.names or [])}
        order = [index_of[name] for name in names]
        self.names = list(names)
        self.places = [self.places[i] for i in order]
        self.shapes = [self.shapes[i] for i in order]


def _saved_groups(
    state: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]
) -> list[_SavedGroup]:
    values = list(state["param_groups"])
    if not saved:
        return [_SavedGroup(each, None) for each in values]
    if len(saved) != len(values):
        raise ValueError(f"it has {len(values)} groups, and names for {len(saved)}")
    return [_SavedGroup(each, names) for each, names in zip(values, saved, strict=True)]


def _check_classes(own: Groups, saved_groups: Sequence[_SavedGroup]) -> None:
    now = {group["optimizer"] for group in own} - {""}
    before = {group.optimizer for group in saved_groups} - {""}
    if now and before and now != before:
        raise CheckpointError(
            f"the checkpoint has the state of {', '.join(sorted(before))}, the optimizer of this "
            f"run is {', '.join(sorted(now))}. {_REMEDY}"
        )


def _rename_tied(saved_groups: Sequence[_SavedGroup], names: Mapping[str, Tensor]) -> None:
    """Use this run's first name of a tied parameter, which may be another one than at the save."""
    first_names = _first_names(names)
    for group in saved_groups:
        if group.names is None:
            continue
        for place, name in enumerate(group.names):
            if name in names:
                group.names[place] = first_names[id(names[name])]


def _can_match_names(own: Groups, saved_groups: Sequence[_SavedGroup]) -> bool:
    """Whether both sides have names, and the same number of parameters without one."""
    saved_names: list[str] = []
    for saved_group in saved_groups:
        if saved_group.names is None:
            return False
        saved_names.extend(saved_group.names)
    own_names: list[str] = []
    for group in own:
        own_names.extend(group["names"])
    return _num_unnamed(own_names) == _num_unnamed(saved_names)


def _num_unnamed(names: Sequence[str]) -> int:
    return sum(name.startswith(_UNNAMED) for name in names)


def _check_parameter_shapes(own_group: Mapping[str, Any], saved_group: _SavedGroup) -> None:
    for name, shape, saved_shape in zip(
        own_group["names"], own_group["shapes"], saved_group.shapes, strict=True
    ):
        if shape is None or saved_shape is None:
            continue
        if shape != list(saved_shape):
            raise CheckpointError(
                f"the parameter {name} has the shape {list(saved_shape)} in the checkpoint's "
                f"optimizer, and {shape} in this run. {_REMEDY}"
            )


def _number_by_position(
    optimizer: Any, state: Mapping[str, Any], fitting: Sequence[_SavedGroup]
) -> dict[str, Any]:
    """The state for ``load_state_dict``: a parameter's key is its position in this run.

    Args:
        fitting: the saved groups in the order of the optimizer's groups and parameters.
    """
    entries = dict(state["state"])
    fitted: dict[str, Any] = {**state, "param_groups": [], "state": {}}
    position = 0
    for group, saved_group in zip(optimizer.param_groups, fitting, strict=True):
        _check_settings(group, saved_group.values)
        group_optimizer = _optimizer_of(optimizer, group)
        may_be_none = saved_group.values.get("momentum", 1) == 0
        is_of_torch = type(group_optimizer) is _torch_class(group_optimizer)
        positions = []
        keys: Collection[str] = ()  # of the first entry of the group that has any
        for parameter, place in zip(group["params"], saved_group.places, strict=True):
            if place in entries:
                entry = entries.pop(place)
                _check_entry(group_optimizer, parameter, entry, position, may_be_none)
                if isinstance(entry, Mapping) and is_of_torch:
                    keys = keys or entry.keys()
                    _check_keys(group_optimizer, entry, keys, position)
                fitted["state"][position] = entry
            positions.append(position)
            position += 1
        values = {**saved_group.values, "params": positions}
        for name, value in group.items():  # a newer version of torch may have more settings
            values.setdefault(name, value)
        fitted["param_groups"].append(values)
    for key, value in entries.items():
        if not isinstance(key, int):  # values of the optimizer as a whole
            fitted["state"][key] = value
    return fitted


def _check_sizes(own: Groups, saved_groups: Sequence[_SavedGroup]) -> None:
    sizes = [len(group["names"]) for group in own]
    saved_sizes = [len(group.places) for group in saved_groups]
    if sizes != saved_sizes:
        raise CheckpointError(
            f"the sizes of the checkpoint's parameter groups are {saved_sizes}, those of this run "
            f"{sizes}. {_REMEDY}"
        )


def _in_order_of_names(own: Groups, saved_groups: Sequence[_SavedGroup]) -> list[_SavedGroup]:
    """The saved groups in the order of this run's groups, each in the order of its parameters.

    Raises CheckpointError if the groups do not have the same names.
    """
    group_of = _group_of_names([group["names"] for group in own])
    saved_group_of = _group_of_names([group.names or [] for group in saved_groups])
    gone = [name for name in saved_group_of if name not in group_of]
    new = [name for name in group_of if name not in saved_group_of]
    if gone or new:
        raise CheckpointError(
            f"parameters only in the checkpoint's optimizer: {_first_of(gone)}; only in that of "
            f"this run: {_first_of(new)}. {_REMEDY}"
        )
    remaining = list(saved_groups)
    fitting = []
    for number, group in enumerate(own):
        match = _with_names(remaining, group["names"])
        if match is None:
            raise CheckpointError(
                _describe_change(number, group["names"], group_of, saved_group_of)
            )
        remaining.remove(match)
        match.reorder(group["names"])
        fitting.append(match)
    if remaining:  # groups without a parameter
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved_groups)} groups, that of this run "
            f"{len(own)}. {_REMEDY}"
        )
    return fitting


def _group_of_names(groups: Sequence[Sequence[str]]) -> dict[str, int]:
    """name of a parameter -> number of its group."""
    group_of = {}
    for number, names in enumerate(groups):
        for name in names:
            group_of[name] = number
    return group_of


def _with_names(groups: Sequence[_SavedGroup], names: Sequence[str]) -> _SavedGroup | None:
    """The first group with these names, in any order."""
    wanted = sorted(names)
    for group in groups:
        if sorted(group.names or ()) == wanted:
            return group
    return None


def _first_of(names: Sequence[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _describe_change(
    number: int,
    names: Sequence[str],
    group_of: Mapping[str, int],
    saved_group_of: Mapping[str, int],
) -> str:
    """Names a parameter that has left the others of its group, or has come to them.

    Args:
        number: of a group of this run that the checkpoint does not have.
        names: of its parameters.
        group_of: name -> number of its group in this run.
        saved_group_of: name -> number of its group in the checkpoint.
    """
    former = saved_group_of[names[0]] if names else number
    came = [name for name in names if saved_group_of[name] != former]
    former_names = [name for name in saved_group_of if saved_group_of[name] == former]
    left = [name for name in former_names if group_of[name] != number]
    moved = [*came, *left]
    if not moved:
        return (
            f"the optimizer has an empty group {number}, that of the checkpoint has none. {_REMEDY}"
        )
    name = moved[0]
    return (
        f"the parameter {name} is in group {saved_group_of[name]} of the checkpoint's optimizer "
        f"and in group {group_of[name]} of this run, with other parameters: its settings are not "
        f"known. {_REMEDY}"
    )


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


def _check_entry(
    optimizer: Any, parameter: Tensor, entry: Any, position: int, may_be_none: bool
) -> None:
    """Compare the shapes of the tensors that torch's kernels will use with that of the parameter.

    Args:
        may_be_none: whether a value may be missing, as momentum that is not used.

    Raises CheckpointError if they do not fit.
    """
    torch_class = _torch_class(optimizer)
    if torch_class is None:
        return
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"the state of parameter {position} is no dict but {entry!r:.80}")
    if issubclass(torch_class, _OTHER_SHAPES) or is_lazy(parameter):
        return
    is_own_class = type(optimizer) is torch_class
    for name, value in entry.items():
        if isinstance(value, Tensor):
            got = f"shape {list(value.shape)}"
            if name in _ONE_VALUE:
                fits = value.numel() == 1
                expected = "one value"
            elif name in _LIKE_PARAMETER or is_own_class:
                fits = value.shape == parameter.shape
                expected = f"shape {list(parameter.shape)}, as its parameter"
            else:  # what a subclass has added
                continue
        else:
            got = repr(value)
            if name in _ONE_VALUE:
                fits = is_number(value)
                expected = "one number"
            elif name in _LIKE_PARAMETER:
                fits = value is None and may_be_none  # SGD without momentum
                expected = f"a tensor of shape {list(parameter.shape)}, as its parameter"
            else:
                continue
        if not fits:
            raise CheckpointError(
                f"the entry {name!r} in the state of parameter {position} "
                f"({torch_class.__name__}) has {got:.80}; accepted: {expected}"
            )


# ---------------------------------------------------------------------- loading


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
        for name in _OF_THE_RUN:
            if name not in own:
                group.pop(name, None)
        group.update(own)  # in their places: the order of the settings stays
    _lay_out_like_parameters(optimizer)
    if changes:
        _logger.warning(
            "The optimizer uses the values of the checkpoint, not of this run:\n%s", changes
        )


def _values_of_the_run(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name in _OF_THE_RUN}


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
        saved_values = _values_at_start(saved_group)
        for name, value in _values_at_start(group).items():
            saved_value = saved_values.get(name, value)
            if value != saved_value:
                rows.append((number, name, value, saved_value))
    if not rows:
        return ""
    headers = ("group", "setting", "of this run", "in the checkpoint")
    return format_table(rows, headers, max_rows=20)


def _check_settings(group: Mapping[str, Any], saved_group: Mapping[str, Any]) -> None:
    """Raises CheckpointError if a saved group is of another kind of optimizer."""
    own = _values_at_start(group).keys()
    saved = _values_at_start(saved_group).keys()
    for name, value in group.items():
        if name in saved_group and name != "params" and name not in _OF_THE_RUN:
            _check_kind(name, value, saved_group[name])
    only_saved = saved - own
    only_own = own - saved
    if only_saved and only_own:  # one alone: another version of torch
        raise CheckpointError(
            f"the optimizer in the checkpoint has {sorted(only_saved)}, this one "
            f"{sorted(only_own)}. {_REMEDY}"
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


def _values_at_start(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group; those with a schedule as at its start."""
    values = {}
    for name, value in group.items():
        if name == "params" or name in _OF_THE_RUN or name.startswith("initial_"):
            continue
        first = group.get(f"initial_{name}", value)
        values[name] = first.tolist() if isinstance(first, Tensor) else first
    return values
