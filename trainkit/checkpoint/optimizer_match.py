"""Bring the saved groups of an optimizer into the order of this run.

Parameters are found by their names. If names are missing, their places count.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from trainkit.checkpoint.errors import CheckpointError
from trainkit.checkpoint.optimizer_groups import UNNAMED, Groups, first_name_by_id

REMEDY = (
    "Resume with the same model and optimizer, or start a new run from the weights (MODEL.WEIGHTS)"
)


class SavedGroup:
    """A parameter group in a checkpoint.

    Attributes:
        values: the group in the saved ``param_groups``.
        places: for each of its parameters, the key in the saved state.
        names: for each parameter, its name at the save; None if the checkpoint has no names.
        shapes: for each parameter, its shape at the save, or None if it is not known.
        optimizer: the name of the optimizer's class; "" if it is not known.
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


def read_groups(state: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> list[SavedGroup]:
    """The groups of a saved state, with their descriptions ``saved``; [] if it has none."""
    values = list(state["param_groups"])
    if not saved:
        return [SavedGroup(each, None) for each in values]
    if len(saved) != len(values):
        raise ValueError(f"it has {len(values)} groups, and names for {len(saved)}")
    return [SavedGroup(*pair) for pair in zip(values, saved, strict=True)]


def match_groups(
    own: Groups, saved_groups: list[SavedGroup], names: Mapping[str, Tensor]
) -> list[SavedGroup]:
    """The saved groups in the order of this run's groups, each in the order of its parameters.

    Args:
        own: the description of this run's optimizer, see `describe_groups`.
        saved_groups: of `read_groups`; they are reordered in place.
        names: of this run, see `names_in`.

    Raises:
        CheckpointError: classes, parameters, groups or shapes differ.
    """
    _check_classes(own, saved_groups)
    _rename_tied(saved_groups, names)
    if _can_match_names(own, saved_groups):
        matching = _in_order_of_names(own, saved_groups)
    else:
        _check_sizes(own, saved_groups)
        matching = saved_groups
    for own_group, saved_group in zip(own, matching, strict=True):
        _check_classes([own_group], [saved_group])
        _check_shapes(own_group, saved_group)
    return matching


def _check_classes(own: Groups, saved_groups: Sequence[SavedGroup]) -> None:
    now = {group["optimizer"] for group in own} - {""}
    before = {group.optimizer for group in saved_groups} - {""}
    if now and before and now != before:
        raise CheckpointError(
            f"the checkpoint has the state of {', '.join(sorted(before))}, the optimizer of this "
            f"run is {', '.join(sorted(now))}. {REMEDY}"
        )


def _rename_tied(saved_groups: Sequence[SavedGroup], names: Mapping[str, Tensor]) -> None:
    """Use this run's first name of a tied parameter, which may be another one than at the save."""
    first_names = first_name_by_id(names)
    for group in saved_groups:
        if group.names is None:
            continue
        for place, name in enumerate(group.names):
            if name in names:
                group.names[place] = first_names[id(names[name])]


def _can_match_names(own: Groups, saved_groups: Sequence[SavedGroup]) -> bool:
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
    return sum(name.startswith(UNNAMED) for name in names)


def _in_order_of_names(own: Groups, saved_groups: Sequence[SavedGroup]) -> list[SavedGroup]:
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
            f"this run: {_first_of(new)}. {REMEDY}"
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
            f"{len(own)}. {REMEDY}"
        )
    return fitting


def _group_of_names(groups: Sequence[Sequence[str]]) -> dict[str, int]:
    """name of a parameter -> number of its group."""
    group_of = {}
    for number, names in enumerate(groups):
        for name in names:
            group_of[name] = number
    return group_of


def _with_names(groups: Sequence[SavedGroup], names: Sequence[str]) -> SavedGroup | None:
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
            f"the optimizer has an empty group {number}, that of the checkpoint has none. {REMEDY}"
        )
    name = moved[0]
    return (
        f"the parameter {name} is in group {saved_group_of[name]} of the checkpoint's optimizer "
        f"and in group {group_of[name]} of this run, with other parameters: its settings are not "
        f"known. {REMEDY}"
    )


def _check_sizes(own: Groups, saved_groups: Sequence[SavedGroup]) -> None:
    sizes = [len(group["names"]) for group in own]
    saved_sizes = [len(group.places) for group in saved_groups]
    if sizes != saved_sizes:
        raise CheckpointError(
            f"the sizes of the checkpoint's parameter groups are {saved_sizes}, those of this run "
            f"{sizes}. {REMEDY}"
        )


def _check_shapes(own_group: Mapping[str, Any], saved_group: SavedGroup) -> None:
    for name, shape, saved_shape in zip(
        own_group["names"], own_group["shapes"], saved_group.shapes, strict=True
    ):
        if shape is None or saved_shape is None:
            continue
        if list(shape) != list(saved_shape):
            raise CheckpointError(
                f"the parameter {name} has the shape {list(saved_shape)} in the checkpoint's "
                f"optimizer, and {list(shape)} in this run. {REMEDY}"
            )
