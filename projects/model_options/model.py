"""What the config keys of this project do to a model, in place; names and values of its state stay."""

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


def apply_options(cfg: CfgNode, model: nn.Module) -> nn.Module:
    """Apply the options; raises ConfigError if a name in BLOCKS is no class of a module."""
    if cfg.MODEL.CHANNELS_LAST:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    names = cfg.MODEL.ACTIVATION_CHECKPOINT.BLOCKS
    classes = {type(module).__name__ for module in model.modules()}
    if not classes >= {*names}:
        raise not_accepted("MODEL.ACTIVATION_CHECKPOINT.BLOCKS", names, ", ".join(sorted(classes)))
    options = cfg.MODEL.COMPILE
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    for block in blocks:
        _checkpoint_activations(block, is_compiled=options.ENABLED)
    if options.ENABLED:
        model.compile(
            backend=options.BACKEND,
            mode=options.MODE,
            fullgraph=options.FULLGRAPH,
            dynamic=options.DYNAMIC,
        )
        logger.info("MODEL.COMPILE: the first steps compile the model, which may take minutes")
        if options.DYNAMIC is None:
            logger.warning(
                "MODEL.COMPILE.DYNAMIC None: kernels depend on earlier shapes, a resumed run "
                "may differ"
            )
        if "autotune" in options.MODE:
            logger.warning(
                "MODEL.COMPILE.MODE %s: kernels chosen by speed, a resumed run may differ",
                options.MODE,
            )
    return model


def _checkpoint_activations(block: nn.Module, *, is_compiled: bool) -> None:
    arguments: dict[str, Any] = {"use_reentrant": False}
    norms = [module for module in block.modules() if isinstance(module, _NormBase)]
    # a compiled block has no side effects, and accepts only torch's own contexts
    if norms and not is_compiled:
        arguments["context_fn"] = lambda: (nullcontext(), _without_statistics(norms))
    block.forward = partial(checkpoint, block.forward, **arguments)


@contextmanager
def _without_statistics(norms: Sequence[_NormBase]) -> Iterator[None]:
    """Context in which norms do not update running statistics: they have counted the batch in the forward pass."""
    counting = []
    for norm in norms:
        if norm.track_running_stats:
            counting.append((norm, norm.momentum, norm.num_batches_tracked))
    for norm, _, _ in counting:
        # switching off track_running_stats would change the tensors kept for the backward pass
        norm.momentum = 0.0
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, momentum, num_batches in counting:
            norm.momentum = momentum
            norm.num_batches_tracked = num_batches
