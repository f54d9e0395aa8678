"""Compare the weights of a file with a model."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from trainkit.utils.logger import format_table

_PREFIX = "module."  # added to every key by DistributedDataParallel and DataParallel
_MAX_ROWS = 60


class Differences:
    """The keys that only a model or only a file has, and different shapes, in lists with fvcore's names.

    ``fitting_keys`` are the other keys; ``shapes`` has those of missing and unexpected keys.
    """

    def __init__(self, weights: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        self.missing_keys = [key for key in own if key not in weights]
        self.unexpected_keys = [key for key in weights if key not in own]
        self.incorrect_shapes = [
            (key, _shape(weights[key]), _shape(own[key]))
            for key in weights
            # a lazy parameter takes its shape from the file; extra state is checked by its module
            if isinstance(own.get(key), Tensor) and not is_lazy(own[key]) and _shape(weights[key]) != _shape(own[key])
        ]
        mismatched = {key for key, _, _ in self.incorrect_shapes}
        self.fitting_keys = [key for key in weights if key in own and key not in mismatched]
        self.shapes = {key: _shape(own[key]) for key in self.missing_keys}
        self.shapes.update((key, _shape(weights[key])) for key in self.unexpected_keys)

    def __bool__(self) -> bool:
        return bool(self.missing_keys or self.unexpected_keys or self.incorrect_shapes)


def table_of(incompatible: Any) -> str:
    """A row for each key in the lists of `Differences`, or in similar lists of fvcore or torch; "" if there is none."""
    shapes = getattr(incompatible, "shapes", {})
    rows = [("missing", key, "-", shapes.get(key, "")) for key in getattr(incompatible, "missing_keys", ())]
    rows += [("unexpected", key, shapes.get(key, ""), "-") for key in getattr(incompatible, "unexpected_keys", ())]
    rows += [("mismatched", *row) for row in getattr(incompatible, "incorrect_shapes", ())]
    cells = [tuple(str([*cell]) if isinstance(cell, tuple) else cell for cell in row) for row in rows]
    headers = ("", "key", "shape in the file", "shape in the model")
    return format_table(cells, headers=headers, max_rows=_MAX_ROWS) if rows else ""


def without_prefix(weights: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights without the prefix ``module.`` of a data-parallel wrapper, unless keys of the model have it too."""
    if not all(str(key).startswith(_PREFIX) for key in weights) or any(key.startswith(_PREFIX) for key in own):
        return weights
    return {key[len(_PREFIX) :]: value for key, value in weights.items()}


def _shape(value: Any) -> tuple[int, ...] | str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return "lazy" if is_lazy(value) else tuple(value.shape)
