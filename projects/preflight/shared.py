"""Parameters that several modules share."""

import re
from collections import defaultdict

from torch import nn


def several_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, value in model.named_parameters(remove_duplicate=False):
        names[id(value)].append(name)
    return [of_one for of_one in names.values() if len(of_one) > 1]


def same_memory(model: nn.Module) -> list[list[str]]:
    """The names of different parameters with the same memory, which the optimizer updates several times."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, value in model.named_parameters():
        is_sharded = type(value) is not nn.Parameter
        if not is_sharded and value.device.type != "meta" and value.numel() > 0:
            names[value.data_ptr()].append(name)
    return [of_one for of_one in names.values() if len(of_one) > 1]


def declared_as_tied(model: nn.Module, name: str) -> bool:
    """Whether a module names the parameter in ``_tied_weights_keys``, as models of Hugging Face do."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        if not name.startswith(start):
            continue
        name_in_module = name.removeprefix(start)
        for key in getattr(module, "_tied_weights_keys", None) or ():
            if re.search(key, name_in_module):
                return True
    return False
