"""Sharded tensors (DTensor), of which each rank holds a part, and models with such parameters.

They are recognized by their methods, since the import of torch's classes takes as long as that of torch.
"""

import importlib
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn


def is_sharded(value: object) -> bool:
    """Whether each rank holds a part of this tensor."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, in the same memory; a tensor that is not sharded is returned as it is."""
    return cast(Any, tensor).to_local() if hasattr(tensor, "to_local") else tensor


def release_gathered(model: nn.Module) -> None:
    """Release parameters gathered by a forward pass without a backward pass: the next pass would use old values."""
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync"):  # it is sharded
            cast(Any, module).reshard()


def shard_like(tensor: Tensor, like: Any) -> Tensor:
    """Shard ``tensor`` like ``like``; every rank has the full tensor, or a part of it in another layout.

    If ``like`` is not sharded, ``tensor`` is returned as it is.
    """
    layout = attrgetter("device_mesh", "placements")
    if not is_sharded(like) or (is_sharded(tensor) and layout(tensor) == layout(like)):
        return tensor
    whole = cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor
    distribute = importlib.import_module("torch.distributed.tensor").distribute_tensor
    whole = whole.detach().to(like.device)
    return cast(Tensor, distribute(whole, like.device_mesh, like.placements, src_data_rank=None))


def shard_optimizer_state(
    state: dict[str, Any], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """The state of an optimizer, sharded like its parameters; it may come from unsharded parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def shard(value: Any, like: Tensor) -> Any:
        return (
            shard_like(value, like)
            if isinstance(value, Tensor) and value.shape == like.shape
            else value
        )

    by_parameter = state["state"].items()
    sharded = {
        i: {name: shard(value, parameters[i]) for name, value in entries.items()}
        for i, entries in by_parameter
    }
    return {**state, "state": sharded}
