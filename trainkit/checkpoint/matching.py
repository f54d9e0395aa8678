"""How the weights of a file fit a model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.utils.tables import format_table

_PREFIX = "module."  # DistributedDataParallel and DataParallel put it before every key
_MAX_ROWS = 60


class Differences:
    """The keys that a model and a file do not share, with their shapes."""

    def __init__(self, weights: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        self.missing = [key for key in own if key not in weights]
        self.unexpected = [key for key in weights if key not in own]
        self.mismatched = [key for key in weights if key in own and not _fits(weights[key], own[key])]
        self._weights, self._own = weights, own

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def table(self) -> str:
        rows = [
            (kind, key, _shape(self._weights, key), _shape(self._own, key))
            for kind in ("missing", "unexpected", "mismatched")
            for key in getattr(self, kind)
        ]
        return format_table(rows, headers=("", "key", "shape in the file", "shape in the model"), max_rows=_MAX_ROWS)


def strip_wrapper_prefix(weights: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """Remove the ``module.`` of a data-parallel wrapper from every key, unless ``model`` has such keys itself."""
    if not weights or not all(str(key).startswith(_PREFIX) for key in weights):
        return weights
    if any(key.startswith(_PREFIX) for key in model.state_dict()):
        return weights
    return {key[len(_PREFIX) :]: value for key, value in weights.items()}


def _fits(value: Any, own: Any) -> bool:
    if not isinstance(own, Tensor):  # extra state: the module itself judges
        return True
    # A lazy parameter takes its shape from the file.
    return isinstance(value, Tensor) and (torch.nn.parameter.is_lazy(own) or value.shape == own.shape)


def _shape(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "-"
    value = values[key]
    if not isinstance(value, Tensor):
        return type(value).__name__
    return "lazy" if torch.nn.parameter.is_lazy(value) else str(list(value.shape))
