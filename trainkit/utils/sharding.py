"""Tensors of which each rank holds a part (DTensor), as those of a model under ``fully_shard``.

torch's own module for them takes as long to import as torch itself, so nothing here imports it before there is one.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn


def is_sharded(value: object) -> bool:
    """Whether this is a tensor of which each rank holds a part."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def first_shard(model: nn.Module) -> Any:
    """A sharded parameter of the model, whose mesh and placements are those of the others; None if there is none."""
    reshard(model)
    return next((parameter for parameter in model.parameters() if is_sharded(parameter)), None)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of it, in the same memory; a tensor that is not sharded is all here."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it, on every rank; itself if it is not sharded. Every rank calls it."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, which every rank has, as ``like`` is sharded; no exchange. Itself if ``like`` is not."""
    if not is_sharded(like) or is_sharded(tensor):
        return tensor
    sharded = cast(Any, like)
    tensor = tensor.detach().to(sharded.device)
    return _import_dtensor().distribute_tensor(tensor, sharded.device_mesh, sharded.placements, src_data_rank=None)


@torch.no_grad()
def empty_like_shard(size: torch.Size, dtype: torch.dtype, like: Tensor) -> Tensor:
    """A tensor of global shape ``size``, sharded as ``like`` is, whose values are not set."""
    sharded = cast(Any, like)
    return _import_dtensor().empty(size, dtype=dtype, device_mesh=sharded.device_mesh, placements=sharded.placements)


def is_sharded_model(model: object) -> TypeGuard[nn.Module]:
    """Whether it went through ``fully_shard``: every forward pass of it is then one of all ranks together."""
    return hasattr(model, "set_requires_gradient_sync")


@contextmanager
def without_reduction(model: nn.Module) -> Iterator[None]:
    """Inside, gradients of a sharded model are added up whole on each rank; the next backward pass averages them."""
    cast(Any, model).set_requires_gradient_sync(False)
    try:
        yield
    finally:
        cast(Any, model).set_requires_gradient_sync(True)


def shard_optimizer_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer, as its parameters are sharded: that of one whose parameters were whole fits too."""
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
    """Let go of parameters that a forward pass has gathered and no backward pass has let go of.

    They would be used once more, whatever happens to the shards meanwhile.
    """
    for module in model.modules():
        if is_sharded_model(module):
            cast(Any, module).reshard()


def _import_dtensor() -> Any:
    return importlib.import_module("torch.distributed.tensor")
