"""Compile the model by ``torch.compile``."""

import os
import re
import shutil
import sys

import torch
from torch import nn

from trainkit.config import CfgNode, ConfigError
from trainkit.utils.device import device_of


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
