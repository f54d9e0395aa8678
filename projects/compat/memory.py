"""Functions that are retried when the memory of a GPU is full, or that pickle refuses."""

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

_logger = logging.getLogger(__name__)


def retry_if_cuda_oom(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``func``: if the GPU runs out of memory, call it again with an empty cache, then on the CPU.

    In the last call, arguments that are tensors are on the CPU, and the result may be on the CPU. ``func`` must have no
    state.
    """

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for _ in range(2):
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:  # extensions raise this type
                if "CUDA out of memory. " not in str(error):
                    raise
            torch.cuda.empty_cache()  # outside except: the error holds the tensors of its frames
        _logger.warning(
            "The GPU has not enough memory for %s, so it runs on the CPU, which is slow", func
        )
        args_on_cpu = [_to_cpu(value) for value in args]
        kwargs_on_cpu = {name: _to_cpu(value) for name, value in kwargs.items()}
        return func(*args_on_cpu, **kwargs_on_cpu)

    return wrapped


def _to_cpu(value: Any) -> Any:
    device = getattr(value, "device", None)
    if getattr(device, "type", None) == "cuda":
        return value.to(device="cpu")
    return value


class PicklableWrapper:
    """Acts like the wrapped object, and is pickled by cloudpickle; unpickling returns the wrapped object.

    Raises ImportError: cloudpickle is missing; when the wrapper is pickled.
    """

    def __init__(self, obj: Any) -> None:
        self._obj: Any = obj._obj if isinstance(obj, PicklableWrapper) else obj

    def __reduce__(self) -> Any:
        cloudpickle = importlib.import_module("cloudpickle")
        return cloudpickle.loads, (cloudpickle.dumps(self._obj),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._obj(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_obj":  # the object is not initialized yet
            raise AttributeError(name)
        return getattr(self._obj, name)
