"""Tensors and models of which each rank holds a part, such as those of torch's ``fully_shard``.

They are recognized by their methods, since the import of torch's classes takes as long as that of torch.
"""

from typing import Any, TypeGuard, cast

from torch import Tensor, nn


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, in the same memory; a tensor that is not divided is returned as it is."""
    return cast(Any, tensor).to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, on every rank; a tensor that is not divided is returned as it is. Every rank calls it."""
    return cast(Any, tensor).full_tensor() if hasattr(tensor, "full_tensor") else tensor


def by_mesh(tensors: list[Tensor]) -> list[list[Tensor]]:
    """The tensors in groups that torch can process in one call."""
    if not tensors or not hasattr(tensors[0], "device_mesh"):
        return [tensors]
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return [*groups.values()]


def needs_all_ranks(model: object) -> TypeGuard[nn.Module]:
    """Whether all ranks must do each forward pass together."""
    return hasattr(model, "set_requires_gradient_sync")


def release_gathered(model: nn.Module) -> None:
    """Release parameters gathered by a forward pass without a backward pass: the next pass would use old values."""
    for module in model.modules():
        if needs_all_ranks(module):
            cast(Any, module).reshard()


def is_divided(model: nn.Module) -> bool:
    """Whether each rank holds a part of some parameter."""
    release_gathered(model)
    return any(hasattr(parameter, "to_local") for parameter in model.parameters())
