"""The trainer in the file of a user's job."""

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from trainkit.config import CfgNode, ConfigError, import_modules
from trainkit.engine import DefaultTrainer

SCRIPT_HELP = (
    "the file of the subclass of DefaultTrainer that builds the model, or of the model that "
    "MODEL.NAME names, and of the data; FILE:NAME if it has several subclasses"
)


def find_trainer(cfg: CfgNode, script: str = "") -> type[DefaultTrainer]:
    """The subclass of ``DefaultTrainer`` in the script.

    If the script has none, it registers the model of MODEL.NAME. Without a script it is
    ``DefaultTrainer`` itself if MODEL.NAME says what the model is, else the subclass in the modules
    of IMPORTS, which are imported.

    Args:
        script: a file, or ``FILE:NAME``; code under ``if __name__ == "__main__"`` is not run.

    Raises:
        ConfigError: the script is no file, or has no such class, or several; nothing says what the
            model is.
    """
    import_modules(cfg.IMPORTS)
    if script:
        return _trainer_of_script(script, has_model=bool(cfg.MODEL.NAME))
    if cfg.MODEL.NAME:
        return DefaultTrainer
    found = _most_derived(_trainers_in(sys.modules[name] for name in cfg.IMPORTS))
    if len(found) == 1:
        return next(iter(found.values()))
    raise ConfigError(
        "MODEL.NAME is empty; if a subclass of DefaultTrainer builds the model, name its file: "
        "--script train.py"
    )


def _trainer_of_script(script: str, *, has_model: bool) -> type[DefaultTrainer]:
    path, _, name = script.partition(":")
    trainers = _trainers_in([_load(path)])
    if has_model and not name and not trainers:
        return DefaultTrainer
    if name in trainers:
        return trainers[name]
    found = {} if name else _most_derived(trainers)
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        names = ", ".join(sorted(found))
        problem = f"several ({names}); name one, such as {path}:{min(found)}"
    else:
        problem = f"no {name or 'such class'}; name the file that defines it"
    raise ConfigError(
        f"--script {script!r} must define a subclass of DefaultTrainer, got {problem}"
    )


def _trainers_in(modules: Iterable[ModuleType]) -> dict[str, type[DefaultTrainer]]:
    """Name -> trainer class of the user; of two with one name the last one."""
    trainers = {}
    for module in modules:
        for value in vars(module).values():
            if _is_trainer(value):
                trainers[value.__name__] = value
    return trainers


def _is_trainer(value: object) -> bool:
    is_ours = getattr(value, "__module__", "").startswith("trainkit.")
    return isinstance(value, type) and issubclass(value, DefaultTrainer) and not is_ours


def _most_derived(trainers: dict[str, type[DefaultTrainer]]) -> dict[str, type[DefaultTrainer]]:
    """Those of which no other one is a subclass."""
    bases: set[type] = set()
    for trainer in trainers.values():
        bases.update(trainer.__mro__[1:])
    return {name: trainer for name, trainer in trainers.items() if trainer not in bases}


def _load(path: str) -> ModuleType:
    file = Path(path).resolve()
    for module in list(sys.modules.values()):
        # it may be in IMPORTS; importing it again would fail
        if getattr(module, "__file__", None) == str(file):
            return module
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--script {path!r} is no file of Python; name the file that trains")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    return module
