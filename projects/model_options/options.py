"""Change a model in place: memory format, activation checkpointing, compilation."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainkit.config import CfgNode, ConfigError
from trainkit.utils.device import device_of
from trainkit.utils.errors import not_accepted

logger = logging.getLogger(__name__)


def use_channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def checkpoint_blocks(cfg: CfgNode, model: nn.Module) -> None:
    """Apply MODEL.ACTIVATION_CHECKPOINT.

    Raises:
        ConfigError: a name in BLOCKS is no class of a module, or a name in KEEP no operation of torch.
    """
    options = cfg.MODEL.ACTIVATION_CHECKPOINT
    kept = [_operation(name) for name in options.KEEP]
    classes = {type(module).__name__ for module in model.modules()}
    if not classes >= {*options.BLOCKS}:
        raise not_accepted("MODEL.ACTIVATION_CHECKPOINT.BLOCKS", options.BLOCKS, ", ".join(sorted(classes)))
    for block in [module for module in model.modules() if type(module).__name__ in options.BLOCKS]:
        # a compiled block has no side effects, and accepts only torch's own contexts
        norms = [] if cfg.MODEL.COMPILE.ENABLED else [m for m in block.modules() if isinstance(m, _NormBase)]
        more: dict[str, Any] = {"context_fn": partial(_contexts, kept, norms)} if norms else {}
        if kept and not norms:
            more = {"context_fn": partial(create_selective_checkpoint_contexts, kept)}
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **more)


def _operation(name: str) -> Any:
    operation = getattr(getattr(torch.ops.aten, name, None), "default", None)
    if operation is None:
        raise not_accepted("MODEL.ACTIVATION_CHECKPOINT.KEEP", name, "operations of torch.ops.aten, such as mm, addmm")
    return operation


def _contexts(kept: Sequence[Any], norms: Sequence[_NormBase]) -> tuple[Any, Any]:
    first, again = create_selective_checkpoint_contexts(kept) if kept else (nullcontext(), nullcontext())
    return first, _without_statistics(norms, again)


@contextmanager
def _without_statistics(norms: Sequence[_NormBase], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Context in which norms do not update running statistics: they have counted the batch in the forward pass."""
    counting = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms if norm.track_running_stats]
    for norm, _, _ in counting:  # switching off track_running_stats would change the tensors kept for the backward pass
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        with inner:
            yield
    finally:
        for norm, momentum, num_batches in counting:
            norm.momentum, norm.num_batches_tracked = momentum, num_batches


def compile_model(cfg: CfgNode, model: nn.Module) -> None:
    """Compile the model in place by MODEL.COMPILE; the keys of its state stay.

    Raises:
        ConfigError: torch does not know the backend; the mode does not allow accumulation.
    """
    options, solver, device = cfg.MODEL.COMPILE, cfg.SOLVER, device_of(model)
    records = options.MODE in ("reduce-overhead", "max-autotune") and device is not None and device.type == "cuda"
    if records and solver.ACCUMULATION_STEPS > 1:
        raise ConfigError(
            f"MODEL.COMPILE.MODE {options.MODE} keeps gradients in memory that the next micro-batch overwrites, so it "
            "excludes SOLVER.ACCUMULATION_STEPS; accepted: default, max-autotune-no-cudagraphs"
        )
    try:
        model.compile(backend=options.BACKEND, mode=options.MODE, fullgraph=options.FULLGRAPH, dynamic=options.DYNAMIC)
    except RuntimeError as error:
        raise ConfigError(f"torch refuses MODEL.COMPILE ({options.BACKEND!r}, {options.MODE!r}): {error}") from error
    if options.DYNAMIC is None:
        logger.warning("MODEL.COMPILE.DYNAMIC None: kernels depend on the shapes seen before, a resumed run may differ")
    if "autotune" in options.MODE:
        logger.warning("MODEL.COMPILE.MODE %s chooses kernels by their speed: a resumed run may differ", options.MODE)
