"""Pickle functions that pickle refuses, such as lambdas."""

import importlib
from typing import Any


class PicklableWrapper:
    """Acts like the wrapped object, and is pickled by cloudpickle; unpickling returns the wrapped object.

    Raises:
        ImportError: cloudpickle is missing; when the wrapper is pickled.
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
