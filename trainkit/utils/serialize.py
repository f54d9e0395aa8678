"""Pickle functions that pickle refuses, such as lambdas."""

import importlib
import io
import marshal
import pickle
import sys
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any


class PicklableWrapper:
    """Acts like the wrapped object; unpickling returns the wrapped object.

    Lambdas and nested functions, also inside the object, are pickled as code with all names that they use. Unpickle
    with the same version of Python.
    """

    def __init__(self, obj: Any) -> None:
        self._obj: Any = obj._obj if isinstance(obj, PicklableWrapper) else obj

    def __reduce__(self) -> Any:
        file = io.BytesIO()
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(self._obj)
        return pickle.loads, (file.getvalue(),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._obj(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_obj":  # the object is not initialized yet
            raise AttributeError(name)
        return getattr(self._obj, name)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType):
            return importlib.import_module, (obj.__name__,)
        if not isinstance(obj, FunctionType) or _is_importable(obj):
            return NotImplemented
        used = {name: obj.__globals__[name] for name in _names(obj.__code__) & obj.__globals__.keys()}
        cells = [cell.cell_contents for cell in obj.__closure__ or ()]
        made = marshal.dumps(obj.__code__), len(cells), obj.__module__
        # the names are pickled after the function, since they may refer to it
        return _make, made, (used, cells, obj.__defaults__, obj.__kwdefaults__), None, None, _fill


def _is_importable(function: FunctionType) -> bool:
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _names(code: CodeType) -> set[str]:
    return {*code.co_names}.union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _make(code: bytes, num_cells: int, module: str) -> FunctionType:
    names = {"__name__": module, "__builtins__": __builtins__}
    return FunctionType(marshal.loads(code), names, closure=tuple(CellType() for _ in range(num_cells)))


def _fill(function: FunctionType, state: tuple[dict[str, Any], list[Any], Any, Any]) -> None:
    names, cells, function.__defaults__, function.__kwdefaults__ = state
    function.__globals__.update(names)
    for cell, content in zip(function.__closure__ or (), cells, strict=True):
        cell.cell_contents = content
