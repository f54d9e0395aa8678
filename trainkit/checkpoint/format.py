"""The seam for formats: how the state of a checkpoint becomes files.

The format of torch.save is the usual one.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from trainkit.checkpoint.file import SUFFIX, Take, plain_state, read_file, write_plain
from trainkit.utils.plugins import find_plugins
from trainkit.utils.registry import Registry

FORMAT_REGISTRY = Registry("FORMAT")
"""CHECKPOINT.FORMAT -> a function ``(model)`` that returns a `CheckpointFormat`."""

# a folder with further files: "<name>.<format>-<8 hex digits>"
_PART_FOLDER = re.compile(r"(.+)\.(\w+)-[0-9a-f]{8}")


class CheckpointFormat:
    """How the state of a checkpoint becomes files; here, one file of ``torch.save``.

    A subclass writes other files. The file at ``path`` commits a save: it is written last, and
    replaced in one step. Further files are in a folder ``<name>.<format>-<8 hex digits>``. The file
    at ``path`` then has an entry with the registered name of the format, by which `format_of` finds
    the format.

    Attributes:
        collective: whether all ranks write; otherwise one process does.
    """

    collective = False

    def prepare(self, state: Mapping[str, Any], take: Take | None = None) -> Any:
        """Returns what `write` gets.

        Args:
            state: plain, see `plain_state`.
            take: replaces its tensors; None: they stay.
        """
        if take is None:
            return state
        return plain_state(dict(state), take=take)

    def submit(self, save: Callable[[], None]) -> Any:
        """Call ``save()``, which calls `write`: now, or later.

        Returns the future of a later call, else None.
        """
        save()

    def write(self, state: Any, path: str) -> None:
        """Write what `prepare` has returned.

        Raises CheckpointError; then the earlier files are unchanged.
        """
        write_plain(state, path)

    def read(self, path: str) -> Any:
        """The state in the file at ``path``, verified. Raises CheckpointError."""
        return read_file(path)

    def fill(
        self,
        state: dict[str, Any],
        path: str,
        model: nn.Module | None = None,
        wanted: Iterable[str] = ("",),
    ) -> dict[str, Any]:
        """The state of `read` with what is in further files, verified; a rank may call it alone.

        Args:
            state: of `read`.
            path: of the file.
            model: the one that gets the state; None: the tensors are whole.
            wanted: the starts of the paths in the state that are needed.
        """
        return state

    def files(self, path: str) -> list[str]:
        """The paths of all existing files of a checkpoint; the file at ``path`` is the last one."""
        return [path]

    def remove(self, path: str) -> None:
        """Remove a checkpoint with the folders of any format.

        Raises OSError; FileNotFoundError if there is none.
        """
        # the folders first, since a folder without its file is never found again
        for folder in part_folders(path):
            shutil.rmtree(folder)
        os.remove(path)


def make_format(name: str, model: nn.Module | None = None) -> CheckpointFormat:
    """The format registered under ``name``, else under ``model.checkpoint_format``.

    Without a name, one file of torch.save.
    """
    name = name or getattr(model, "checkpoint_format", "")
    if not name:
        return CheckpointFormat()
    made: CheckpointFormat = FORMAT_REGISTRY.get(name)(model)
    return made


def format_of(state: Mapping[str, Any]) -> CheckpointFormat:
    """The format that wrote a file with this content."""
    for name in [*find_plugins().formats, *dict(FORMAT_REGISTRY)]:
        if name in state:
            return make_format(name)
    return CheckpointFormat()


def owner_of_part(folder: str) -> str:
    """The name of the checkpoint file to which a folder of this name belongs.

    ``""`` if no format of a plug-in makes such a folder. Folders of a format that a program has
    registered itself are not known here, so nothing removes them.
    """
    match = _PART_FOLDER.fullmatch(folder)
    if match is None or match[2] not in find_plugins().formats:
        return ""
    return match[1] + SUFFIX


def part_folders(path: str) -> list[str]:
    """The folders with further files of the checkpoint ``path``."""
    folder, name = os.path.split(os.path.abspath(path))
    entries = [entry for entry in os.listdir(folder) if owner_of_part(entry) == name]
    return [os.path.join(folder, entry) for entry in entries]
