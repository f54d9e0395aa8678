"""Parameters that several modules share."""

import re
from collections import defaultdict

from torch import nn


def several_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, value in model.named_parameters(remove_duplicate=False):
        names[id(value)].append(name)
    return [each for each in names.values() if len(each) > 1]


def same_memory(model: nn.Module) -> list[list[str]]:
    """The names of different parameters with the same memory, which the optimizer updates several times."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, value in model.named_parameters():
        # a sharded one has no address
        if type(value) is nn.Parameter and value.device.type != "meta" and value.numel():
            names[value.data_ptr()].append(name)
    return [each for each in names.values() if len(each) > 1]


def declared_as_tied(model: nn.Module, name: str) -> bool:
    """Whether a module names the parameter in ``_tied_weights_keys``, as models of Hugging Face do."""
    for prefix, module in model.named_modules():
        keys = getattr(module, "_tied_weights_keys", None) or ()
        start = f"{prefix}." if prefix else ""
        if name.startswith(start):
            rest = name.removeprefix(start)
            if any(re.search(key, rest) for key in keys):
                return True
    return False
