"""Apply a config's options to a model: memory format, activation checkpointing, compilation."""

import os
import re
import shutil
import sys
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


def apply_model_options(cfg: CfgNode, model: nn.Module) -> nn.Module:
    """Apply ``MODEL.CHANNELS_LAST`` and ``MODEL.ACTIVATION_CHECKPOINT`` in place; names and values of the state stay.

    Raises:
        ConfigError: a name in BLOCKS matches no module, or a name in KEEP no operation of torch.
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


def compile_model(cfg: CfgNode, model: nn.Module) -> None:
    """Compile the model in place if MODEL.COMPILE is enabled; the keys of its state stay.

    Raises:
        ConfigError: torch does not know the backend, or finds no compiler; the mode does not allow accumulation.
    """
    options, device = cfg.MODEL.COMPILE, device_of(model)
    if not options.ENABLED:
        return
    graphs = options.MODE in ("reduce-overhead", "max-autotune") and device is not None and device.type == "cuda"
    if graphs and (cfg.SOLVER.ACCUMULATION_STEPS > 1 or cfg.SOLVER.ACCUMULATION_FACTORS):
        raise ConfigError(
            f"MODEL.COMPILE.MODE {options.MODE} keeps losses and gradients in memory that the next micro-batch "
            f"overwrites, but SOLVER.ACCUMULATION_STEPS is {cfg.SOLVER.ACCUMULATION_STEPS}, ACCUMULATION_FACTORS "
            f"{cfg.SOLVER.ACCUMULATION_FACTORS}; use MODE default or max-autotune-no-cudagraphs, or SOLVER.GRAPH, "
            "which records accumulation as a whole"
        )
    if options.BACKEND == "inductor":
        require_cpp_compiler(device)
    try:
        model.compile(backend=options.BACKEND, mode=options.MODE, fullgraph=options.FULLGRAPH, dynamic=options.DYNAMIC)
    except RuntimeError as error:
        raise ConfigError(f"torch refuses MODEL.COMPILE ({options.BACKEND!r}, {options.MODE!r}): {error}") from error


def explain_graph_break(cfg: CfgNode, error: RuntimeError) -> None:
    """Raises ConfigError if the error is caused by MODEL.COMPILE.FULLGRAPH; the message has one line."""
    options = cfg.MODEL.COMPILE
    if not options.ENABLED or not options.FULLGRAPH or not isinstance(error, torch._dynamo.exc.Unsupported):
        return
    reason, *_ = str(error).splitlines()
    lines = [":".join(line) for line in re.findall(r'File "(.+)", line (\d+)', str(error))]
    raise ConfigError(
        f"MODEL.COMPILE.FULLGRAPH is True, but the model is not one graph: {reason} "
        f"(in {lines[-1] if lines else 'its code'}); change the model there, or set FULLGRAPH to False"
    ) from error


def require_cpp_compiler(device: torch.device | None) -> None:
    """
    Raises:
        ConfigError: there is no compiler for models on a CPU; the default backend needs it in the first step.
    """
    if sys.platform != "linux" or (device is not None and device.type != "cpu"):
        return
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"models on a CPU are compiled by the C++ compiler {compiler!r}, which is not installed; install it, name "
            "another in the environment variable CXX, or switch off MODEL.COMPILE or SOLVER.GRAPH"
        )


def describe_inexact_compilation(cfg: CfgNode) -> list[str]:
    """Effects of MODEL.COMPILE that a resumed run does not reproduce."""
    options = cfg.MODEL.COMPILE
    reasons = {
        "kernels depend on the shapes seen before (MODEL.COMPILE.DYNAMIC None)": options.DYNAMIC is None,
        "torch.compile chooses kernels again by their speed (MODEL.COMPILE.MODE)": "autotune" in options.MODE,
    }
    return [reason for reason, is_so in reasons.items() if is_so and options.ENABLED]
