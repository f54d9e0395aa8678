"""What the parameter groups of an optimizer are."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainkit.solver.param_groups import NORM_LAYERS
from trainkit.utils.logger import format_table


def group_names(groups: Optimizer | Iterable[Mapping[str, Any]], model: nn.Module) -> list[str]:
    """A name for each group, such as ``norm`` or ``backbone.layers.3 weight+bias``: where its parameters are, and what.

    A group that has a ``name`` keeps it. Groups alike get a number.
    """
    modules = dict(model.named_modules())
    names = {param: name for name, param in model.named_parameters()}

    def kind_of(name: str) -> str:
        owner, _, leaf = name.rpartition(".")
        return "norm" if isinstance(modules.get(owner), NORM_LAYERS) else "bias" if leaf == "bias" else "weight"

    seen, found = Counter[str](), []
    for group in groups.param_groups if isinstance(groups, Optimizer) else groups:
        own = [names.get(param, "") for param in group["params"]]
        places = [name.split(".")[:-1] for name in own]
        same = itertools.takewhile(lambda parts: len({*parts}) == 1, itertools.zip_longest(*places))
        place = ".".join(parts[0] for parts in same)
        kinds = "+".join(dict.fromkeys(map(kind_of, own)))
        name = group.get("name") or f"{place} {kinds}".strip()
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return found


def describe_param_groups(groups: Optimizer | Iterable[Mapping[str, Any]], model: nn.Module) -> str:
    """A table of an optimizer's groups with their rates and sizes; if a rate is a tensor, this waits for its device."""
    groups, rows = list(groups.param_groups if isinstance(groups, Optimizer) else groups), []
    for name, group in zip(group_names(groups, model), groups, strict=True):
        rates = [f"{float(group[key]):g}" if key in group else "" for key in ("lr", "weight_decay")]
        rows.append([name, *rates, len(group["params"]), f"{sum(param.numel() for param in group['params']):,}"])
    headers = ["group", "lr", "decay", "parameters", "values"]
    return format_table(rows, headers, tablefmt="pipe", disable_numparse=True)
