"""The seam for formats: how the state of a checkpoint becomes files. The format of torch.save is the usual one."""

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

_PART = re.compile(r"(.+)\.(\w+)-[0-9a-f]{8}")


class CheckpointFormat:
    """How the state of a checkpoint becomes files: one file of ``torch.save``, unless a subclass writes others.

    The file at ``path`` commits a save: it is written last, and replaced in one step. Further files are in a folder
    ``<name>.<format>-<8 hex digits>``, and the file has an entry with the format's registered name, by which the format
    is found. With ``collective`` all ranks write, otherwise one process does.
    """

    collective = False

    def prepare(self, state: Mapping[str, Any], take: Take | None = None) -> Any:
        """What `write` gets. ``state`` is plain, see `plain_state`; ``take`` replaces its tensors."""
        return state if take is None else plain_state(dict(state), take=take)

    def submit(self, save: Callable[[], None]) -> Any:
        """Call ``save()``, which calls `write`: now, or later; returns the future of a later call, else None."""
        save()

    def write(self, state: Any, path: str) -> None:
        """Write what `prepare` has returned. Raises CheckpointError; the earlier files are unchanged then."""
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

        ``model`` gets the state (None: whole tensors); ``wanted``: the starts of the paths that are needed.
        """
        return state

    def files(self, path: str) -> list[str]:
        """The paths of all existing files of a checkpoint; the file at ``path`` is the last one."""
        return [path]

    def remove(self, path: str) -> None:
        """Remove a checkpoint with the folders of any format. Raises OSError; FileNotFoundError if there is none."""
        # first, since a folder without its file is never found again
        for part in part_folders(path):
            shutil.rmtree(part)
        os.remove(path)


def make_format(name: str, model: nn.Module | None = None) -> CheckpointFormat:
    """The format registered under ``name``, else under ``model.checkpoint_format``, else one file of torch.save."""
    name = name or getattr(model, "checkpoint_format", "")
    made: CheckpointFormat = FORMAT_REGISTRY.get(name)(model) if name else CheckpointFormat()
    return made


def format_of(state: Mapping[str, Any]) -> CheckpointFormat:
    """The format that wrote a file with this content."""
    return make_format(
        next(
            (name for name in [*find_plugins().formats, *dict(FORMAT_REGISTRY)] if name in state),
            "",
        )
    )


def owner_of_part(folder: str) -> str:
    """The name of the checkpoint file to which a folder of this name belongs; ``""`` if it is no such folder."""
    match = _PART.fullmatch(folder)
    return match[1] + SUFFIX if match and match[2] in find_plugins().formats else ""


def part_folders(path: str) -> list[str]:
    """The folders with further files of the checkpoint ``path``."""
    folder, name = os.path.split(os.path.abspath(path))
    return [
        os.path.join(folder, entry) for entry in os.listdir(folder) if owner_of_part(entry) == name
    ]
