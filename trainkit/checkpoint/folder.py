"""Find the checkpoints of a folder, and the one to resume from."""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from trainkit.checkpoint.atomic import CheckpointError
from trainkit.checkpoint.file import SUFFIX, is_file_of, is_ours, read_file
from trainkit.checkpoint.format import format_of

_logger = logging.getLogger(__name__)

TAG_FILE = "last_checkpoint"
FINISHED_FILE = "finished"
PUBLISHED = re.compile(r"(.+)_published(-[0-9a-f]{8})?\.(pth|safetensors)")


def checkpoint_files(folder: str) -> list[str]:
    """Paths of all ``.pth`` files, sorted by name; none if the folder does not exist."""
    # glob would hide that a folder cannot be read
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in names if name.endswith(SUFFIX) and name[0] != "."]


def _newest_first(folder: str) -> list[str]:
    """Paths of all checkpoints except published weights, newest first; if times are equal, the last name first."""
    dated = []
    for path in checkpoint_files(folder):
        if PUBLISHED.fullmatch(os.path.basename(path)):  # no run can resume from published weights
            continue
        with contextlib.suppress(OSError):  # another process may remove files; a link may lead nowhere
            dated.append((os.stat(path).st_mtime_ns, path))
    return [path for _, path in sorted(dated, reverse=True)]


def tagged_file(folder: str) -> str:
    """Path of the file that ``last_checkpoint`` names, which may not exist; ``""`` if there is no name.

    Raises:
        CheckpointError: ``last_checkpoint`` holds no file name, or names a file outside the folder.
    """
    if not folder:
        return ""
    tag_file = os.path.join(folder, TAG_FILE)
    if not is_file_of(folder, TAG_FILE):  # do not read it, since errors would show its content
        raise CheckpointError(
            f"'{tag_file}' is a link out of its folder; delete it to resume from the newest checkpoint"
        )
    try:
        with open(tag_file, encoding="utf-8", errors="replace") as file:
            name = file.read().strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise CheckpointError(f"cannot read '{tag_file}': {error.strerror}") from error
    if not name:
        return ""
    if not is_file_of(folder, name):
        raise CheckpointError(
            f"'{tag_file}' names {name!r:.200}; it has to hold the bare name of a file in its folder, no link out of "
            "it. Write that name into it, or delete it to resume from the newest checkpoint"
        )
    return os.path.join(folder, name)


def find_checkpoint(folder: str) -> str:
    """Path of the file in ``last_checkpoint``; without it, of the newest trainkit checkpoint; else ``""``.

    Raises:
        CheckpointError: as `tagged_file`.
    """
    return tagged_file(folder) or next(filter(is_ours, _newest_first(folder)), "")


def choose(
    folder: str, known_as_broken: Mapping[str, str] = {}, read: Callable[[str], Any] = read_file
) -> tuple[str, Any]:
    """The path and the content of the checkpoint to resume from: the tagged one, else the newest intact one.

    One read verifies and loads the file, without its shards. If there is no checkpoint, the path is ``""``.

    Args:
        known_as_broken: path -> error, for files that are not read.
        read: a function that reads a file.

    Raises:
        CheckpointError: there are checkpoints, but none is intact.
    """
    tagged = tagged_file(folder)
    broken: list[str] = []
    for path in dict.fromkeys([*filter(None, [tagged]), *_newest_first(folder)]):
        try:
            if path in known_as_broken:
                raise CheckpointError(known_as_broken[path])
            content = read(path)
            format_of(content).verify(content, path, num_parts=0)
        except CheckpointError as error:
            broken.append(str(error))
            continue
        # A foreign file is used only if it is tagged; otherwise it may be weights that a user has put there.
        if path == tagged or is_ours(path):
            if broken:
                _logger.warning("Resuming from '%s' instead, because %s", path, "; ".join(broken))
            return path, content
    if broken:
        raise CheckpointError(
            f"no checkpoint in '{folder}' is intact: {'; '.join(broken)}. To start a new run, use another folder or "
            "leave out --resume"
        )
    return "", None
