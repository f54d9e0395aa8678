"""What a config does to a model that is built: its memory format, and activations that are computed again."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainkit.config import CfgNode, ConfigError


def apply_model_options(cfg: CfgNode, model: nn.Module) -> nn.Module:
    """``MODEL.CHANNELS_LAST`` and ``MODEL.ACTIVATION_CHECKPOINT``, in place; names and values of the state stay.

    Raises:
        ConfigError: a name in BLOCKS fits no module, one in KEEP no operation of torch.
    """
    if cfg.MODEL.CHANNELS_LAST:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    options = cfg.MODEL.ACTIVATION_CHECKPOINT
    kept = [_operation(name) for name in options.KEEP]
    more: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, kept)} if kept else {}
    for block in find_blocks(model, options.BLOCKS, "MODEL.ACTIVATION_CHECKPOINT.BLOCKS"):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **more)
    return model


def find_blocks(model: nn.Module, names: Sequence[str], key: str) -> list[nn.Module]:
    """The modules of classes of these names.

    Raises:
        ConfigError: there is no module of a class of this name; ``key`` is where the names stand.
    """
    found = [module for module in model.modules() if type(module).__name__ in names]
    if missing := sorted(set(names) - {type(module).__name__ for module in found}):
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(f"{key}: no module is a {', '.join(missing)}; the model has {', '.join(classes)}")
    return found


def _operation(name: str) -> Any:
    operation = getattr(getattr(torch.ops.aten, name, None), "default", None)
    if operation is None:
        raise ConfigError(
            f"MODEL.ACTIVATION_CHECKPOINT.KEEP: torch.ops.aten has no operation {name!r}; those of matrix products are "
            "mm, addmm and bmm"
        )
    return operation
