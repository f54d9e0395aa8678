"""Find the checkpoints of a folder, and the one to resume from."""

import json
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

from trainkit.checkpoint.atomic import CheckpointError
from trainkit.checkpoint.file import SUFFIX, read_file
from trainkit.utils.file_io import refuse_pipe
from trainkit.utils.loading import load_plugin
from trainkit.utils.plugins import NAMES

_logger = logging.getLogger(__name__)

mirrors: dict[str, Any] = {}
"""Local folder -> the object that copies its files to an address, see `trainkit.projects.remote.mirror.Mirror`."""


def local_folder(path: str) -> str:
    """The local folder for the files of a run: ``path``, or if it is an address, one of `mirrors`."""
    return str(load_plugin(NAMES["Mirror"]).make_mirror(path)) if "://" in path else path


def checkpoint_files(folder: str) -> list[str]:
    """Paths of all ``.pth`` files, sorted by name; none if the folder does not exist."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [
        os.path.join(folder, name) for name in names if name.endswith(SUFFIX) and name[0] != "."
    ]


def candidates(folder: str) -> list[str]:
    """The tagged file, then others, newest first; [] without a tag. Downloads `mirrors`. Raises as `tagged_file`."""
    if folder in mirrors:
        mirrors[folder].download()
    tagged = tagged_file(folder)
    newest_first = sorted(
        checkpoint_files(folder), key=lambda path: (os.lstat(path).st_mtime_ns, path), reverse=True
    )
    return [tagged, *newest_first] if tagged else []


def tagged_file(folder: str) -> str:
    """Path of the file that ``last_checkpoint`` names, which may not exist; ``""`` if there is no name.

    Raises:
        CheckpointError: it holds no file name, or leads out of the folder.
    """
    tag_file = os.path.join(folder, "last_checkpoint")
    if not folder or not os.path.lexists(tag_file):
        return ""
    # do not read it, since errors would show its content
    if not is_file_of(folder, "last_checkpoint"):
        raise CheckpointError(f"'{tag_file}' is a link out of its folder; delete it")
    try:
        refuse_pipe(tag_file)
        with open(tag_file, encoding="utf-8", errors="replace") as file:
            name = file.read().strip()
    except OSError as error:
        raise CheckpointError(f"cannot read '{tag_file}': {error.strerror or error}") from error
    if name and not is_file_of(folder, name):
        raise CheckpointError(
            f"'{tag_file}' names {name!r:.200}; it has to hold the bare name of a file in its folder"
        )
    return os.path.join(folder, name) if name else ""


def choose(paths: Iterable[str], read: Callable[[str], Any] = read_file) -> tuple[str, Any]:
    """Path and content of the first of the `candidates` that ``read`` can read; ``""`` if there are none.

    Raises:
        CheckpointError: there are candidates, but none is intact.
    """
    broken: list[str] = []
    for path in dict.fromkeys(paths):
        try:
            content = read(path)
        except CheckpointError as error:
            broken.append(str(error))
            continue
        if broken:
            _logger.warning("Resuming from '%s' instead, because %s", path, "; ".join(broken))
        return path, content
    if broken:
        raise CheckpointError(
            f"no checkpoint is intact: {'; '.join(broken)}. To start a new run, leave out --resume"
        )
    return "", None


def read_finished(folder: str) -> Any:
    """What a finished run has written into the file ``finished``; None if the file is missing or damaged."""
    try:
        path = os.path.join(folder, "finished")
        refuse_pipe(path)
        with open(path, "rb") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def is_file_of(folder: str, name: str) -> bool:
    """Whether ``name`` is a file name in ``folder`` without a path, and not a link out of it; it need not exist."""
    is_name = (
        name.isprintable() and name not in (os.curdir, os.pardir) and os.path.basename(name) == name
    )
    return is_name and os.path.dirname(
        os.path.realpath(os.path.join(folder, name))
    ) == os.path.realpath(folder)
