"""Change a model in place: memory format, activation checkpointing, compilation."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from trainkit.config import CfgNode
from trainkit.utils.errors import not_accepted

logger = logging.getLogger(__name__)


def use_channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def checkpoint_blocks(cfg: CfgNode, model: nn.Module) -> None:
    """Apply MODEL.ACTIVATION_CHECKPOINT. Raises ConfigError if a name in BLOCKS is no class of a module."""
    names, classes = cfg.MODEL.ACTIVATION_CHECKPOINT.BLOCKS, {type(module).__name__ for module in model.modules()}
    if not classes >= {*names}:
        raise not_accepted("MODEL.ACTIVATION_CHECKPOINT.BLOCKS", names, ", ".join(sorted(classes)))
    for block in [module for module in model.modules() if type(module).__name__ in names]:
        # a compiled block has no side effects, and accepts only torch's own contexts
        norms = [] if cfg.MODEL.COMPILE.ENABLED else [m for m in block.modules() if isinstance(m, _NormBase)]
        more: dict[str, Any] = {"context_fn": lambda norms=norms: (nullcontext(), _without_statistics(norms))}
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **(more if norms else {}))


@contextmanager
def _without_statistics(norms: Sequence[_NormBase]) -> Iterator[None]:
    """Context in which norms do not update running statistics: they have counted the batch in the forward pass."""
    counting = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms if norm.track_running_stats]
    for norm, _, _ in counting:  # switching off track_running_stats would change the tensors kept for the backward pass
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, num_batches in counting:
            norm.momentum, norm.num_batches_tracked = momentum, num_batches


def compile_model(cfg: CfgNode, model: nn.Module) -> None:
    """Compile the model in place by MODEL.COMPILE; the keys of its state stay."""
    options = cfg.MODEL.COMPILE
    model.compile(backend=options.BACKEND, mode=options.MODE, fullgraph=options.FULLGRAPH, dynamic=options.DYNAMIC)
    if options.DYNAMIC is None:
        logger.warning("MODEL.COMPILE.DYNAMIC None: kernels depend on the shapes seen before, a resumed run may differ")
    if "autotune" in options.MODE:
        logger.warning("MODEL.COMPILE.MODE %s chooses kernels by their speed: a resumed run may differ", options.MODE)
