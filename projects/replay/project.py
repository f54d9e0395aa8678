"""Which code is the user's own. A checkpoint names a script and modules; they run only if they are in the project."""

import os
import re
import sysconfig
from collections.abc import Iterable
from importlib import util
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from trainkit.config import ConfigError
from trainkit.utils import comm

_INSTALLED = re.compile(r"/(site|dist)-packages/|/lib(32|64)?/python\d")
_OF_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")  # in the top folder of a virtual environment


class Project:
    """The project of the current folder: the folder above it that has ``.git``, or else the current folder itself.

    Links are followed. The standard library, virtual environments and installed packages are not in the project, even
    if their folders are. IMPORTS may also name ``trainkit``, ``trainkit_selfsup`` and the ``projects`` of its checkout.
    """

    def __init__(self, left_out: str | os.PathLike[str] = "") -> None:
        """
        Args:
            left_out: the files in this folder may be of somebody else: they are not in the project, unless the current
                folder is in there too.
        """
        here = Path.cwd().resolve()
        self.folder = next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
        other = Path(left_out).resolve() if left_out else None
        self._left_out = None if other is None or here.is_relative_to(other) else other

    def relative(self, path: str | os.PathLike[str]) -> str:
        """The path of a file of the project relative to its folder; "" if the file is not there or not in it."""
        real = _real(path)
        return str(real.relative_to(self.folder)) if real is not None and real.is_file() and self._has(real) else ""

    def has_folder(self, path: str) -> bool:
        real = _real(path)
        return real is not None and real.is_dir() and self._has(real)

    def has_script(self, path: str) -> bool:
        """Whether this is a Python file of the project that may be run with the arguments of a checkpoint.

        Of trainkit's own tools this is only ``train_net.py``: others start commands.
        """
        real, tools = _real(path), checkout() / "tools"
        if real is None or real.suffix != ".py" or not self.relative(path):  # runpy also runs archives, of any name
            return False
        return not real.is_relative_to(tools) or real == tools / "train_net.py"

    def find_module(self, name: Any) -> ModuleSpec | None:
        """The module, if it and its parents are in the project; nothing is imported."""
        parts = name.split(".") if isinstance(name, str) else [""]
        if not all(part.isidentifier() for part in parts):
            return None
        spec: ModuleSpec | None = None
        path: list[str] | None = None
        for depth, part in enumerate(parts):
            try:  # with the last word of the name only: a folder without __init__.py would look for its parent
                spec = PathFinder.find_spec(part, path) if depth else util.find_spec(part)
            except (ImportError, ValueError):  # ValueError: a module without a spec, such as __main__
                return None
            if spec is None or not self._may_import(spec):
                return None
            if spec.submodule_search_locations is None:
                return spec if depth == len(parts) - 1 else None
            path = [*spec.submodule_search_locations]
        return spec

    def check_imports(self, names: Iterable[Any], given: Iterable[Any] = ()) -> None:
        """Check the modules of IMPORTS in a file; those in ``given`` are the user's choice.

        Raises:
            ConfigError: one is neither in the project nor in trainkit.
        """
        names, given = [*names], [*given]
        for name in names:
            is_ours = isinstance(name, str) and name.partition(".")[0] in ("trainkit", "trainkit_selfsup")
            if name not in given and not is_ours and self.find_module(name) is None:
                raise ConfigError(
                    f"IMPORTS of the run has {name!r:.80}, which is not in the project {str(self.folder)!r}, and a "
                    "file does not choose code; if you trust it, name the modules in your own command: IMPORTS "
                    f'"{names!s:.200}" (a replay takes your command after --)'
                )

    def _may_import(self, spec: ModuleSpec) -> bool:
        if spec.has_location and spec.origin is not None:
            projects, real = checkout() / "projects", _real(spec.origin)
            is_checkout = (checkout() / "setup.py").is_file()
            return bool(self.relative(spec.origin)) or (
                is_checkout and real is not None and real.is_relative_to(projects)
            )
        return spec.origin is None and spec.submodule_search_locations is not None  # a folder without __init__.py

    def _has(self, real: Path) -> bool:
        if not real.is_relative_to(self.folder) or real.is_relative_to(sysconfig.get_path("stdlib")):
            return False
        if self._left_out is not None and real.is_relative_to(self._left_out):
            return False
        relative = real.relative_to(self.folder)
        above = [self.folder / folder for folder in relative.parents if folder.name]
        is_installed = any((folder / mark).exists() for folder in above for mark in _OF_ENVIRONMENT)
        return not is_installed and _INSTALLED.search(f"/{relative.as_posix()}") is None


def checkout() -> Path:
    """The folder that holds ``trainkit``."""
    return Path(comm.__file__).resolve().parents[2]


def _real(path: str | os.PathLike[str]) -> Path | None:
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError, ValueError):  # links in a circle, a NUL
        return None
