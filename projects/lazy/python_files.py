"""Config files in Python, and the relative imports between them."""

import builtins
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from trainkit.projects.lazy.nodes import to_node

from trainkit.utils.errors import ConfigError


def run_file(path: str) -> ModuleType:
    """Run a config file as a module of its own, which is not in ``sys.modules``.

    Raises ConfigError: the file cannot be read. Errors of its code are not changed.
    """
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path!r}: {error.strerror}") from error
    module = ModuleType(f"<config {path}>")
    # An import statement calls __import__ of its own namespace, so this changes no other code
    own_builtins = {**vars(builtins), "__import__": partial(_import, path)}
    vars(module).update(__file__=path, __builtins__=own_builtins)
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    return module


def _import(
    path: str,
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """The import statement of the config file ``path``; a relative import runs the named file."""
    if level == 0:
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    folder = os.path.join(os.path.dirname(path), *[os.pardir] * (level - 1))
    wanted = os.path.normpath(os.path.join(folder, *name.split("."))) + ".py"
    if not os.path.isfile(wanted):
        raise ImportError(f"{path}: the relative import from {'.' * level + name!r}: {wanted} does not exist")
    module = run_file(wanted)
    for imported in list(vars(module)) if "*" in (fromlist or ()) else fromlist or ():
        value = vars(module).get(imported)
        if isinstance(value, dict) and not imported.startswith("_"):
            setattr(module, imported, to_node(value))
    return module
