"""Sharded tensors (DTensor), of which each rank holds a part, and models with such parameters.

They are recognized by their methods, since the import of torch's classes takes as long as that of torch.
"""

import importlib
from typing import Any, cast

import torch
from torch import Tensor, nn


def is_sharded(value: object) -> bool:
    """Whether each rank holds a part of this tensor."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, in the same memory; a tensor that is not sharded is returned as it is."""
    if not hasattr(tensor, "to_local"):
        return tensor
    return cast(Any, tensor).to_local()


def release_gathered(model: nn.Module) -> None:
    """Release parameters gathered by a forward pass without a backward pass: the next pass would use old values."""
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync"):  # it is sharded
            cast(Any, module).reshard()


def shard_like(tensor: Tensor, like: Any) -> Tensor:
    """Shard ``tensor`` like ``like``; every rank has the full tensor, or a part of it in another layout.

    If ``like`` is not sharded, ``tensor`` is returned as it is.
    """
    if not is_sharded(like):
        return tensor
    whole: Any = tensor
    if is_sharded(tensor):
        if _layout_of(tensor) == _layout_of(like):
            return tensor
        whole = whole.full_tensor()
    distribute = importlib.import_module("torch.distributed.tensor").distribute_tensor
    whole = whole.detach().to(like.device)
    return cast(Tensor, distribute(whole, like.device_mesh, like.placements, src_data_rank=None))


def _layout_of(tensor: Any) -> tuple[Any, Any]:
    return tensor.device_mesh, tensor.placements


def shard_optimizer_state(
    state: dict[str, Any], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """The state of an optimizer, sharded like its parameters; it may come from unsharded parameters."""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    sharded: dict[int, dict[str, Any]] = {}
    for number, entries in state["state"].items():
        like = parameters[number]
        sharded[number] = {}
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.shape == like.shape:
                value = shard_like(value, like)
            sharded[number][name] = value
    return {**state, "state": sharded}
