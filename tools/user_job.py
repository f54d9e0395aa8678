"""Shared by tools: find the trainer in a user's file, read a number of the command line, and make the log quiet."""

import argparse
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from trainkit.config import CfgNode, ConfigError, import_modules
from trainkit.engine import DefaultTrainer

SCRIPT_HELP = (
    "the file of the subclass of DefaultTrainer that builds the model, and of its data; "
    "FILE:NAME if it has several"
)


def positive(text: str) -> int:
    """The type of an argument that is a number of things."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"need an integer >= 1, got {text!r}")
    return int(text)


def find_trainer(cfg: CfgNode, script: str = "") -> type[DefaultTrainer]:
    """The subclass of ``DefaultTrainer`` in the script; ``DefaultTrainer`` itself if MODEL.NAME says what the model is.

    Without a script and MODEL.NAME, it is the subclass in the modules of IMPORTS, which are imported.

    Args:
        script: a file, or ``FILE:NAME``; the code under ``if __name__ == "__main__"`` is not run.

    Raises:
        ConfigError: the script is no file, or has no such class, or several; nothing says what the model is.
    """
    import_modules(cfg.IMPORTS)
    if cfg.MODEL.NAME and not script:
        return DefaultTrainer
    path, _, name = script.partition(":")
    modules = [_load(path)] if script else [sys.modules[module] for module in cfg.IMPORTS]
    found = {
        value.__name__: value
        for module in modules
        for value in vars(module).values()
        if _is_trainer(value)
    }
    if name:
        found = {name: found[name]} if name in found else {}
    else:
        bases = {base for trainer in found.values() for base in trainer.__mro__[1:]}
        found = {name: trainer for name, trainer in found.items() if trainer not in bases}
    if len(found) == 1:
        return next(iter(found.values()))
    if script:
        several = (
            f"several ({', '.join(sorted(found))}); name one, such as {path}:{min(found)}"
            if found
            else ""
        )
        none = f"no {name or 'such class'}; name the file that defines it"
        raise ConfigError(
            f"--script {script!r} must define a subclass of DefaultTrainer, got {several or none}"
        )
    raise ConfigError(
        "MODEL.NAME is empty; if a subclass of DefaultTrainer builds the model, name its file: --script train.py"
    )


@contextmanager
def only_logging(level: int) -> Iterator[None]:
    """Context in which trainkit logs nothing below this level."""
    logger = logging.getLogger("trainkit")
    former = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(former)


def _is_trainer(value: object) -> bool:
    is_ours = getattr(value, "__module__", "").startswith("trainkit.")
    return isinstance(value, type) and issubclass(value, DefaultTrainer) and not is_ours


def _load(path: str) -> ModuleType:
    file = Path(path).resolve()
    for module in [*sys.modules.values()]:  # it may be in IMPORTS; importing it again would fail
        if getattr(module, "__file__", None) == str(file):
            return module
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--script {path!r} is no file of Python; name the file that trains")
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    return module
