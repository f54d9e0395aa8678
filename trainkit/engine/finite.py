"""Values that are not finite: finding them in a model, and the error that names them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

from trainkit.utils.device import all_tensors

# tensors of at most so many values are checked together, since each call has its price
_MOST_VALUES_OF_SMALL = 1024


@torch.no_grad()
def non_finite_names(model: nn.Module, except_for: Collection[str] = ()) -> list[str]:
    """Names of parameters and buffers with a value that is not finite on this rank.

    Waits for the device. Sparse and nested tensors are not looked at.
    """
    # to find the names takes longer than the check
    if not except_for and are_certainly_finite(all_tensors(model)):
        return []
    tensors = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in except_for and _can_be_checked(tensor):
            tensors[name] = tensor
    if are_certainly_finite(tensors.values()):
        return []
    return [name for name, tensor in tensors.items() if not _own_part(tensor).isfinite().all()]


def _can_be_checked(tensor: Tensor) -> bool:
    if is_lazy(tensor) or tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        return False
    return tensor.is_floating_point() or tensor.is_complex()


def _own_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, in a type that has operations."""
    own_part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if own_part.itemsize == 1:  # float8
        return own_part.float()
    return own_part


@torch.no_grad()
def are_certainly_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values are finite; fast. False also if their norm is too large for their type."""
    large: list[Tensor] = []
    small: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if not _can_be_checked(tensor):
            continue
        own_part = _own_part(tensor)
        if own_part.numel() > _MOST_VALUES_OF_SMALL:
            large.append(own_part)
        else:
            alike = (own_part.device, own_part.dtype, own_part.shape)
            small.setdefault(alike, []).append(own_part)
    stacked = [torch.stack(group) for group in small.values()]
    return bool(get_total_norm(large + stacked).isfinite())


def describe_failure(what: str, iter: int, values: Mapping[str, Any], more: str = "") -> str:
    """The message of a failure.

    Args:
        what: with its verb, such as "loss is".
        values: of the iteration; flags are left out.
        more: is added after the values.
    """
    numbers = {name: float(value) for name, value in values.items() if not name.startswith("[")}
    return (
        f"the {what} not finite in iteration {iter}: {numbers}{more}. Lower the learning rate, "
        "clip gradients, or look at the batch of this iteration"
    )


def raise_failure(by_rank: Sequence[str | None]) -> None:
    """Raise the first failure, if there is one.

    Ranks that have exchanged theirs pass the same list.

    Raises:
        FloatingPointError: a rank has a failure; with several ranks the message names it.
    """
    for rank, failure in enumerate(by_rank):
        if failure is not None:
            if len(by_rank) > 1:
                failure = f"{failure} (on rank {rank})"
            raise FloatingPointError(failure)
