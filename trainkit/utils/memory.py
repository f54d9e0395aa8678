"""What to do when the memory of a GPU is full."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

_logger = logging.getLogger(__name__)


def retry_if_cuda_oom(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func``, called again where the memory of a GPU does not suffice: with an empty cache, then on the CPU.

    The last call gets its tensors, those that are arguments themselves, on the CPU, and what it returns may be there.
    ``func`` must have no state.
    """

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for _ in range(2):
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:  # of extensions, too
                if "CUDA out of memory. " not in str(error):
                    raise
            torch.cuda.empty_cache()  # without the error, which holds the tensors of its frames
        _logger.warning("The memory of the GPU does not suffice for %s; it runs on the CPU, which is slow", func)
        return func(*map(_to_cpu, args), **{name: _to_cpu(value) for name, value in kwargs.items()})

    return wrapped


def _to_cpu(value: Any) -> Any:
    return value.to(device="cpu") if getattr(getattr(value, "device", None), "type", None) == "cuda" else value
