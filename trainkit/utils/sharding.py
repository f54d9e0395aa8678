"""Sharded tensors (DTensor), of which each rank holds a part, as in a model under ``fully_shard``.

The import of torch's module for them takes as long as that of torch, so it is done only if there is such a tensor.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from trainkit.utils import comm


def is_sharded(value: object) -> bool:
    """Whether each rank holds a part of this tensor."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def first_shard(model: nn.Module) -> Any:
    """The first sharded parameter, or None. Without tensor parallelism, all sharded parameters have its layout."""
    reshard(model)
    return next((parameter for parameter in model.parameters() if is_sharded(parameter)), None)


def by_mesh(tensors: list[Tensor]) -> list[list[Tensor]]:
    """The tensors in groups that torch can process in one call; one group without tensor parallelism."""
    if comm.get_tensor_parallel() == 1:
        return [tensors]
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return [*groups.values()]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, in the same memory; a tensor that is not sharded is returned as it is."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, on every rank; a tensor that is not sharded is returned as it is. Every rank calls it."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def shard_like(tensor: Tensor, like: Any) -> Tensor:
    """Shard ``tensor`` like ``like``; every rank has the full tensor, or a part of it in another layout.

    If ``like`` is not sharded, ``tensor`` is returned as it is.
    """
    layout = attrgetter("device_mesh", "placements")
    if not is_sharded(like) or (is_sharded(tensor) and layout(tensor) == layout(like)):
        return tensor
    tensor = whole(tensor).detach().to(like.device)
    return _import_dtensor().distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def is_sharded_model(model: object) -> TypeGuard[nn.Module]:
    """Whether ``fully_shard`` was called on the model: then all ranks must do each forward pass together."""
    return hasattr(model, "set_requires_gradient_sync")


@contextmanager
def without_reduction(model: nn.Module) -> Iterator[None]:
    """Context: each rank sums full gradients of a sharded model; the next backward pass averages them over ranks."""
    cast(Any, model).set_requires_gradient_sync(False)
    try:
        yield
    finally:
        cast(Any, model).set_requires_gradient_sync(True)


def shard_optimizer_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer, sharded like its parameters; it may come from unsharded parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(map(is_sharded, parameters)):
        return state
    sharded = {
        i: {
            name: shard_like(value, parameters[i])
            if isinstance(value, Tensor) and value.shape == parameters[i].shape
            else value
            for name, value in entries.items()
        }
        for i, entries in state["state"].items()
    }
    return {**state, "state": sharded}


def reshard(model: nn.Module) -> None:
    """Release parameters gathered by a forward pass without a backward pass: the next pass would use old values."""
    for module in model.modules():
        if is_sharded_model(module):
            cast(Any, module).reshard()


def _import_dtensor() -> Any:
    return importlib.import_module("torch.distributed.tensor")
