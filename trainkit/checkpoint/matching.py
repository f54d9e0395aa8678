"""Compare the weights of a file with a model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.utils.tables import format_table

_PREFIX = "module."  # added to every key by DistributedDataParallel and DataParallel
_MAX_ROWS = 60


class Differences:
    """The keys that only a model or only a file has, and different shapes; the lists have fvcore's names.

    Attributes:
        incorrect_shapes: (key, shape in the file, shape in the model).
        shapes: key -> shape, of the missing and unexpected keys.
    """

    def __init__(self, weights: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        self.missing_keys = [key for key in own if key not in weights]
        self.unexpected_keys = [key for key in weights if key not in own]
        self.incorrect_shapes = [
            (key, _shape(weights[key]), _shape(own[key]))
            for key in weights
            if key in own and not _fits(weights[key], own[key])
        ]
        self.shapes = {key: _shape(own[key]) for key in self.missing_keys}
        self.shapes.update((key, _shape(weights[key])) for key in self.unexpected_keys)

    def __bool__(self) -> bool:
        return bool(self.missing_keys or self.unexpected_keys or self.incorrect_shapes)


def table_of(incompatible: Any) -> str:
    """A row for each key in the lists of `Differences`, or in similar lists of fvcore or torch; "" if there is none."""
    shapes = getattr(incompatible, "shapes", {})
    rows: list[tuple[Any, ...]] = [
        ("missing", key, "-", shapes.get(key, "")) for key in getattr(incompatible, "missing_keys", ())
    ]
    rows += [("unexpected", key, shapes.get(key, ""), "-") for key in getattr(incompatible, "unexpected_keys", ())]
    rows += [("mismatched", *row) for row in getattr(incompatible, "incorrect_shapes", ())]
    rows = [tuple(str([*cell]) if isinstance(cell, tuple) else cell for cell in row) for row in rows]
    headers = ("", "key", "shape in the file", "shape in the model")
    return format_table(rows, headers=headers, max_rows=_MAX_ROWS) if rows else ""


def strip_wrapper_prefix(weights: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """Remove the prefix ``module.`` of a data-parallel wrapper from every key, unless keys of ``model`` have it too."""
    is_prefixed = all(str(key).startswith(_PREFIX) for key in weights)
    if not is_prefixed or any(key.startswith(_PREFIX) for key in model.state_dict()):
        return weights
    return {key[len(_PREFIX) :]: value for key, value in weights.items()}


def _fits(value: Any, own: Any) -> bool:
    if not isinstance(own, Tensor):  # extra state, which the module checks itself
        return True
    # A lazy parameter takes its shape from the file.
    return isinstance(value, Tensor) and (torch.nn.parameter.is_lazy(own) or value.shape == own.shape)


def _shape(value: Any) -> tuple[int, ...] | str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return "lazy" if torch.nn.parameter.is_lazy(value) else tuple(value.shape)
