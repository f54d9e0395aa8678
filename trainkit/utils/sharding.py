"""Sharded tensors (DTensor), of which each rank holds a part, as in a model under ``fully_shard``.

The import of torch's module for them takes as long as that of torch, so it is done only if there is such a tensor.
"""

import importlib
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.utils.parts import local_part as local_part
from trainkit.utils.parts import release_gathered, whole


def is_sharded(value: object) -> bool:
    """Whether each rank holds a part of this tensor."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def first_shard(model: nn.Module) -> Any:
    """The first sharded parameter, or None. Without tensor parallelism, all sharded parameters have its layout."""
    release_gathered(model)
    return next((parameter for parameter in model.parameters() if is_sharded(parameter)), None)


def shard_like(tensor: Tensor, like: Any) -> Tensor:
    """Shard ``tensor`` like ``like``; every rank has the full tensor, or a part of it in another layout.

    If ``like`` is not sharded, ``tensor`` is returned as it is.
    """
    layout = attrgetter("device_mesh", "placements")
    if not is_sharded(like) or (is_sharded(tensor) and layout(tensor) == layout(like)):
        return tensor
    tensor = whole(tensor).detach().to(like.device)
    return _import_dtensor().distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


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


def _import_dtensor() -> Any:
    return importlib.import_module("torch.distributed.tensor")
