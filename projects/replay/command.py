"""The command that a replay runs: the one that the user gives, or the recorded one if its code is the user's own."""

import os
import re
import runpy
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainkit.projects.replay.project import Project

from trainkit.config import ConfigError

# A replay takes place in the processes that it finds. The last of these options counts; with other values, `launch`
# would train in new processes.
_ONE_PROCESS = {"--num-gpus": "1", "--num-machines": "1", "--machine-rank": "0"}


class Command(NamedTuple):
    """``python script arguments`` or ``python -m module arguments``, started in ``folder``."""

    script: str
    module: str
    arguments: Sequence[str]
    folder: str

    def __str__(self) -> str:
        words = ["python", *(["-m", self.module] if self.module else [self.script]), *self.arguments]
        # no control characters of a stranger on the terminal
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in shlex.join(words))


def given_command(words: Sequence[str]) -> Command:
    """``python FILE ...``, ``python -m MODULE ...`` or ``FILE ...``, as words. Raises ConfigError for anything else."""
    rest = [*words]
    if rest and re.fullmatch(r"python[\d.]*(\.exe)?", os.path.basename(rest[0])):
        del rest[0]
    if len(rest) > 1 and rest[0] == "-m":
        return Command("", rest[1], rest[2:], os.getcwd())
    if not rest or not os.path.isfile(rest[0]):
        accepted = "python FILE ..., python -m MODULE ... or FILE ..., with a file that is there"
        raise ConfigError(f"the command is {shlex.join(words)!r}; accepted: {accepted}")
    return Command(os.path.abspath(rest[0]), "", rest[1:], os.getcwd())


def recorded_command(origin: Mapping[str, Any], project: Project) -> Command:
    """The command in a checkpoint.

    The folder is the recorded one if it is in the project, or else the current folder.

    Raises:
        ConfigError: the script or the module is not in the project, or an argument is a Python file that is not.
    """
    argv, module, folder = (origin.get(key) for key in ("argv", "module", "folder"))
    is_plain = isinstance(argv, list) and argv and all(isinstance(word, str) for word in argv)
    if not is_plain or not isinstance(module, str) or not isinstance(folder, str):
        raise ConfigError("the file does not hold the command of its run; give it (`-- python train.py`)")
    assert isinstance(argv, list)
    folder = folder if project.has_folder(folder) else os.getcwd()
    command = Command("" if module else os.path.join(folder, argv[0]), module, argv[1:], folder)
    reason = _reason_against(command, project)
    for word in argv[1:]:
        files = [file for file in (word, *re.split(r"[=:,;\s'\"\[\](){}]+", word)) if file.endswith(".py")]
        if outside := [file for file in files if _is_outside(os.path.join(folder, file), project)]:
            reason = reason or f"{outside[0]!r} is not in the project {str(project.folder)!r}"
    if reason:
        raise ConfigError(
            f"the file says that its run was started by: {command} - but {reason}, and a file does not choose what "
            "runs; if you trust this command, give it to the replay (`-- python train.py`)"
        )
    return command


def run_command(command: Command) -> None:
    """Run the command in this process, as Python does."""
    former = sys.argv, [*sys.path], os.getcwd()
    arguments, spawns = [*command.arguments], [*_ONE_PROCESS.items()]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    spawns = [(option, value) for option, value in spawns if any(word.startswith(option) for word in arguments[:end])]
    arguments[end:end] = [word for pair in spawns for word in pair]
    sys.argv = [command.module or command.script, *arguments]
    try:
        os.chdir(command.folder)
        sys.path.insert(0, os.getcwd() if command.module else os.path.dirname(command.script))
        if command.module:
            runpy.run_module(command.module, run_name="__main__", alter_sys=True)
        elif os.path.isfile(command.script):
            runpy.run_path(command.script, run_name="__main__")
        else:
            raise ConfigError(f"the script of the run is not there: {command.script!r}; give the command after --")
    finally:
        sys.argv, sys.path[:] = former[:2]
        os.chdir(former[2])


def _reason_against(command: Command, project: Project) -> str:
    if not command.module:
        is_own = project.has_script(command.script)
        return "" if is_own else f"this script is not a Python file of the project {str(project.folder)!r}"
    former = [*sys.path]
    sys.path.insert(0, command.folder)
    try:
        spec = project.find_module(command.module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = project.find_module(f"{command.module}.__main__")
    finally:
        sys.path[:] = former
    is_own = spec is not None and spec.origin is not None and project.has_script(spec.origin)
    return "" if is_own else f"this module is not in the project {str(project.folder)!r}"


def _is_outside(file: str, project: Project) -> bool:
    return os.path.lexists(file) and not project.relative(file)
