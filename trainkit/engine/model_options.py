"""Apply a config's options to a model: memory format and activation checkpointing."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainkit.config import CfgNode, ConfigError


def apply_model_options(cfg: CfgNode, model: nn.Module) -> nn.Module:
    """Apply ``MODEL.CHANNELS_LAST`` and ``MODEL.ACTIVATION_CHECKPOINT`` in place; names and values of the state stay.

    Raises:
        ConfigError: a name in BLOCKS matches no module, or one in KEEP no operation of torch.
    """
    if cfg.MODEL.CHANNELS_LAST:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    options = cfg.MODEL.ACTIVATION_CHECKPOINT
    kept = [_operation(name) for name in options.KEEP]
    for block in find_blocks(model, options.BLOCKS, "MODEL.ACTIVATION_CHECKPOINT.BLOCKS"):
        # a compiled block has no side effects, and accepts only torch's own contexts
        norms = [] if cfg.MODEL.COMPILE.ENABLED else [m for m in block.modules() if isinstance(m, _NormBase)]
        more: dict[str, Any] = {"context_fn": partial(_contexts, kept, norms)} if norms else {}
        if kept and not norms:
            more = {"context_fn": partial(create_selective_checkpoint_contexts, kept)}
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **more)
    return model


def _contexts(kept: Sequence[Any], norms: Sequence[_NormBase]) -> tuple[Any, Any]:
    first, again = create_selective_checkpoint_contexts(kept) if kept else (nullcontext(), nullcontext())
    return first, _without_statistics(norms, again)


@contextmanager
def _without_statistics(norms: Sequence[_NormBase], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Inside, norms do not update running statistics: they have counted the batch in the forward pass."""
    counting = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms if norm.track_running_stats]
    for norm, _, _ in counting:  # switching off track_running_stats would change the tensors kept for the backward pass
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        with inner:
            yield
    finally:
        for norm, momentum, num_batches in counting:
            norm.momentum, norm.num_batches_tracked = momentum, num_batches


def find_blocks(model: nn.Module, names: Sequence[str], key: str) -> list[nn.Module]:
    """The modules whose class has one of these names.

    Raises:
        ConfigError: a name matches no module; ``key`` is the config key of the names.
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
