"""The description of an optimizer in a checkpoint: for each group, names, shapes and the class.

``optimizer.state_dict()`` knows parameters only by their places. The description stands beside it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

Groups = list[dict[str, Any]]
"""For each parameter group: ``optimizer``, ``names`` and ``shapes``."""

UNNAMED = "#"
"""The start of the name of a parameter that is in none of the modules; a number follows."""

_WRAPPERS = {"module", "_orig_mod"}  # of DistributedDataParallel and torch.compile


def describe_groups(optimizer: Any, names: Mapping[str, Tensor]) -> Groups:
    """What a checkpoint holds beside ``optimizer.state_dict()``.

    [] if the optimizer has no ``param_groups``.
    """
    first_names = first_name_by_id(names)
    groups: Groups = []
    num_unnamed = 0
    for group in getattr(optimizer, "param_groups", ()):
        own_names = []
        for parameter in group["params"]:
            name = first_names.get(id(parameter))
            if name is None:
                name = f"{UNNAMED}{num_unnamed}"
                num_unnamed += 1
            own_names.append(name)
        shapes = [_shape_of(parameter) for parameter in group["params"]]
        kind = _class_name(optimizer_of(optimizer, group))
        groups.append({"optimizer": kind, "names": own_names, "shapes": shapes})
    return groups


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
    parts = name.split(".")
    if _WRAPPERS.isdisjoint(parts):
        return name
    return ".".join(part for part in parts if part not in _WRAPPERS)


def first_name_by_id(names: Mapping[str, Tensor]) -> dict[int, str]:
    """``id`` of a parameter -> the first of its names."""
    first_names: dict[int, str] = {}
    for name, parameter in names.items():
        first_names.setdefault(id(parameter), name)
    return first_names


def _shape_of(parameter: Tensor) -> torch.Size | None:
    """The global shape; None if it is not known before the first forward pass."""
    return None if is_lazy(parameter) else parameter.shape


def optimizer_of(optimizer: Any, group: Mapping[str, Any]) -> Any:
    """The optimizer that updates the group: itself, or one that it is made of.

    The attributes ``optimizers`` and ``optimizer`` hold these.
    """
    parts = [*getattr(optimizer, "optimizers", ()), getattr(optimizer, "optimizer", None)]
    for part in parts:
        for part_group in getattr(part, "param_groups", ()):
            if part_group is group:
                return optimizer_of(part, group)
    return optimizer


def _class_name(optimizer: Any) -> str:
    """The class that decides what the state holds; "" if it is not known.

    A subclass of it, such as one that clips, has the same state.
    """
    torch_class = torch_class_of(optimizer)
    if torch_class is not None:
        return torch_class.__name__
    if not isinstance(optimizer, Optimizer):
        return ""
    # the last one is torch's Optimizer itself
    optimizer_classes = [each for each in type(optimizer).__mro__ if issubclass(each, Optimizer)]
    if len(optimizer_classes) == 1:
        return ""
    return optimizer_classes[-2].__name__


def torch_class_of(optimizer: Any) -> type | None:
    """torch's own class of an optimizer, such as AdamW; None if it is not derived from one."""
    for each in type(optimizer).__mro__:
        if each is not Optimizer and each.__module__.startswith("torch.optim."):
            return each
    return None
