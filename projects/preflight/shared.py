"""Parameters that several modules share."""

import re
from collections import defaultdict

from torch import nn


def several_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names_by_id: dict[int, list[str]] = defaultdict(list)
    for name, value in model.named_parameters(remove_duplicate=False):
        names_by_id[id(value)].append(name)
    return _with_company(names_by_id)


def same_memory(model: nn.Module) -> list[list[str]]:
    """The names of different parameters with the same memory, which the optimizer updates several times."""
    names_by_address: dict[int, list[str]] = defaultdict(list)
    for name, value in model.named_parameters():
        if _has_memory(value):
            address = value.data_ptr()
            names_by_address[address].append(name)
    return _with_company(names_by_address)


def _has_memory(value: nn.Parameter) -> bool:
    is_sharded = type(value) is not nn.Parameter
    if is_sharded or value.device.type == "meta":
        return False
    return value.numel() > 0


def _with_company(names: dict[int, list[str]]) -> list[list[str]]:
    """The lists of several names."""
    found = []
    for names_of_one in names.values():
        if len(names_of_one) > 1:
            found.append(names_of_one)
    return found


def declared_as_tied(model: nn.Module, name: str) -> bool:
    """Whether a module names the parameter in ``_tied_weights_keys``, as models of Hugging Face do."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        if not name.startswith(start):
            continue
        name_in_module = name.removeprefix(start)
        patterns = getattr(module, "_tied_weights_keys", None) or ()
        for pattern in patterns:
            if re.search(pattern, name_in_module):
                return True
    return False
