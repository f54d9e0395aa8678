"""The inputs of two sets of batches, compared by the mean and the deviation of each channel."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path

_MIN_SAMPLES = 8
_IS_SURE = 5.0  # standard errors
_MOST_CHANNELS = 1000


class Field(NamedTuple):
    """One input of all samples.

    Attributes:
        kind: type and number of channels.
        means, squares: ``[samples, channels]``, of the values and of their squares.
        is_image: whether the channels are those of images.
    """

    kind: str
    means: Tensor
    squares: Tensor
    is_image: bool

    def describe(self) -> str:
        mean = self.means.mean()
        std = (self.squares.mean() - mean**2).clamp(min=0).sqrt()
        return f"mean {mean:.2g}, std {std:.2g}"


def fields_of(batches: list[Any]) -> dict[str, Field]:
    """Path -> input. An input is a tensor of numbers that are not whole, or of images ``[N, C, H, W]``."""
    parts: dict[str, list[Field]] = {}
    for batch in batches:
        for path, leaf in tree_leaves_with_path(batch):
            if not isinstance(leaf, Tensor) or leaf.ndim <= 1:
                continue
            if leaf.is_floating_point() or leaf.dtype == torch.uint8:
                name = keystr(path).strip("[]'")
                parts.setdefault(name, []).append(_field_of(leaf))
    fields = {}
    for name, of_batches in parts.items():
        first = of_batches[0]
        if any(part.kind != first.kind for part in of_batches):
            continue
        means = torch.cat([part.means for part in of_batches])
        squares = torch.cat([part.squares for part in of_batches])
        fields[name] = Field(first.kind, means, squares, first.is_image)
    return fields


def _field_of(leaf: Tensor) -> Field:
    values = leaf.detach().double().cpu()
    if values.ndim == 4 and values.shape[-1] <= 4 < values.shape[1]:  # [N, H, W, C]
        values = values.movedim(-1, 1)
    if values.ndim == 3 or values.shape[1] > _MOST_CHANNELS:
        values = values.flatten(1).unsqueeze(1)
    if values.ndim > 2:
        values = values.flatten(2)
    else:
        values = values.unsqueeze(2)
    # now [samples, channels, places]
    dtype = str(leaf.dtype).removeprefix("torch.")
    kind = f"{dtype} with {values.shape[1]} channels"
    means = values.mean(2)
    squares = values.square().mean(2)
    return Field(kind, means, squares, is_image=leaf.ndim == 4)


def compare(train: Field, val: Field) -> Iterator[str]:
    """What is different between TRAIN and VAL, in words.

    A difference counts if it is large and no chance: means that differ by half a deviation, deviations by a factor
    of two, or two channels of which the brighter one is the other one in VAL.
    """
    if train.kind != val.kind:
        yield f"TRAIN has {train.kind}, VAL {val.kind}"
        return
    center = train.means.mean(0)
    num_channels = len(center)
    spread_train = _spread(train, center)
    spread_val = _spread(val, center)
    variance_train = spread_train.mean(0)
    variance_val = spread_val.mean(0)

    difference = (val.means.mean(0) - center).abs()
    has_moved = difference > 0.5 * variance_train.sqrt()
    has_moved &= difference > _IS_SURE * _error(train.means, val.means)
    if has_moved.any():
        yield f"the means differ (in {int(has_moved.sum())} of {num_channels} channels)"

    growth = (variance_val - variance_train).abs()
    is_other = variance_val > 4 * variance_train
    is_other |= variance_val < variance_train / 4
    is_other &= growth > _IS_SURE * _error(spread_train, spread_val)
    if is_other.any():
        yield f"the deviations differ (in {int(is_other.sum())} of {num_channels} channels)"

    if train.is_image and num_channels <= 4:
        for i, k in itertools.combinations(range(num_channels), 2):
            difference_train = train.means[:, i] - train.means[:, k]
            difference_val = val.means[:, i] - val.means[:, k]
            if _is_swapped(difference_train, difference_val):
                yield f"channels {i} and {k} have changed places"


def _spread(field: Field, center: Tensor) -> Tensor:
    """``[samples, channels]``: the mean square distance to ``center``."""
    return field.squares - 2 * center * field.means + center**2


def _error(first: Tensor, second: Tensor) -> Tensor:
    """The standard error of the difference of two means over samples."""
    variance_first = first.var(0) / len(first)
    variance_second = second.var(0) / len(second)
    return (variance_first + variance_second).sqrt()


def _is_swapped(train: Tensor, val: Tensor) -> bool:
    """Whether the difference of two channels has the opposite sign, and about the same size."""
    sure_train = _standard_errors(train)
    sure_val = _standard_errors(val)
    is_by_chance = min(sure_train.abs(), sure_val.abs()) < _IS_SURE
    if is_by_chance or sure_train.sign() == sure_val.sign():
        return False
    ratio = (train.mean() / val.mean()).abs()
    return bool(0.5 < ratio < 2)


def _standard_errors(values: Tensor) -> Tensor:
    """The mean, in standard errors."""
    error = values.std() / len(values) ** 0.5
    return values.mean() / error.clamp(min=1e-12)


def has_enough(field: Field) -> bool:
    return len(field.means) >= _MIN_SAMPLES
