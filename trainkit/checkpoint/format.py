"""The seam for formats: how the state of a checkpoint becomes files. The format of torch.save is the usual one."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trainkit.checkpoint.file import SUFFIX, read_file, write_plain
from trainkit.checkpoint.state import ORDINARY, Take, plain_state
from trainkit.utils.plugins import FORMATS
from trainkit.utils.registry import Registry

FORMAT_REGISTRY = Registry("FORMAT")
"""CHECKPOINT.FORMAT -> a function without arguments that returns a `CheckpointFormat`."""


class CheckpointFormat:
    """How the state of a checkpoint becomes files; `docs/extending.md` has an example.

    A subclass overrides `write` and `read`. The file at ``path`` commits a save: it is written last, and replaced in
    one step. Further files are in a folder `part_folder`, and the file has an entry with the format's registered name;
    then the format is found when the file is read.

    Attributes:
        collective: whether all ranks write; otherwise one process does.
    """

    collective = False
    _others: Sequence["CheckpointFormat"] = ()

    def write(self, state: Mapping[str, Any], path: str) -> None:
        """Write a state that `prepare` has returned. Raises CheckpointError; the earlier files are unchanged then."""
        raise NotImplementedError

    def read(self, path: str) -> Any:
        """The state in the file at ``path``, verified. Raises CheckpointError."""
        raise NotImplementedError

    def files(self, path: str) -> list[str]:
        """The paths of all existing files of a checkpoint; the file at ``path`` is the last one."""
        return [*(file for part in part_folders(path) for file in _files_in(part)), path]

    def remove(self, path: str) -> None:
        """Remove a checkpoint. Raises OSError; FileNotFoundError if there is none."""
        os.remove(path)
        remove_parts(path)

    def accepts(self, state: Mapping[str, Any]) -> bool:
        """Whether this format can store the weights; if not, a format of a project is asked."""
        return True

    def prepare(self, state: Mapping[str, Any], take: Take | None = None) -> dict[str, Any]:
        """A copy of ``state`` for `write`, which may run later and in another thread; see `plain_state` for ``take``.

        Raises:
            TypeError: the format cannot store a value; the message has its path.
        """
        return plain_state(dict(state), take=take)

    def verify(self, state: Mapping[str, Any], path: str, *, part: int = 0, num_parts: int = 1) -> None:
        """Check the further files of a state that `read` has returned.

        Args:
            part, num_parts: compare the content of every ``num_parts``-th file, from file ``part``; 0 parts: of none.

        Raises:
            CheckpointError: a file is missing or damaged.
        """

    def fill(
        self, state: dict[str, Any], path: str, model: nn.Module | None = None, wanted: Iterable[str] = ("",)
    ) -> dict[str, Any]:
        """The state with what is in further files; a rank may call it alone.

        Args:
            model: the model that gets the state; None: tensors are whole.
            wanted: the starts of the paths that are needed.
        """
        return state

    def adapt(self, weights: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Weights for a model whose ``state_dict`` is ``own``, which this format accepts."""
        return weights

    def for_state(self, state: Mapping[str, Any]) -> "CheckpointFormat":
        """This format, or another one if only that one can store the weights."""
        if not self.accepts(state):
            self._others = self._others or [make_format(name) for name in FORMATS]
            return next((other for other in self._others if other.accepts(state)), self)
        return self

    def submit(self, save: Callable[[], None]) -> Any:
        """Make the calls of a save, now or later; returns the future of a later one, else None."""
        save()

    def wait(self) -> None:
        """Wait until nothing is being written."""

    def raise_error(self) -> None:
        """Raise the CheckpointError of a later save that has failed, once."""


class TorchFormat(CheckpointFormat):
    """One file of ``torch.save``, see `trainkit.checkpoint.file`; also reads ``.safetensors``."""

    def accepts(self, state: Mapping[str, Any]) -> bool:
        return all(type(weight) in ORDINARY for weight in state["model"].values() if isinstance(weight, Tensor))

    def write(self, state: Mapping[str, Any], path: str) -> None:
        write_plain(state, path)
        with contextlib.suppress(OSError):  # the next save tries again
            remove_parts(path)

    def read(self, path: str) -> Any:
        return read_file(path)


def make_format(name: str) -> CheckpointFormat:
    """The format that is registered under ``name``. Raises KeyError if there is none."""
    made: CheckpointFormat = FORMAT_REGISTRY.get(name)()
    return made


def format_of(state: Mapping[str, Any]) -> CheckpointFormat:
    """The format that wrote a file with this content."""
    names = {**dict.fromkeys(FORMATS), **dict(FORMAT_REGISTRY)}
    return next((make_format(name) for name in names if name in state), TorchFormat())


def read_whole(path: str, wanted: Iterable[str] = ("",)) -> dict[str, Any]:
    """The state of a checkpoint, all files verified and read; ``wanted`` as for `fill`. Raises CheckpointError."""
    state = read_file(path)
    form = format_of(state)
    form.verify(state, path)
    return form.fill(state, path, wanted=wanted)


# ---------------------------------------------------------------------------- further files of a checkpoint
_PART = re.compile(r"(.+)\.(\w+)-[0-9a-f]{8}")


def part_folder(path: str, name: str, token: str) -> str:
    """The folder for further files of the checkpoint ``path``; ``token``: 8 hex digits, new for each save."""
    return f"{path.removesuffix(SUFFIX)}.{name}-{token}"


def owner_of_part(folder: str) -> str:
    """The name of the checkpoint file to which a folder of this name belongs; ``""`` if it is no such folder."""
    match = _PART.fullmatch(folder)
    return "" if match is None or match[2] not in FORMATS else match[1] + SUFFIX


def part_folders(path: str) -> list[str]:
    """The folders with further files of the checkpoint ``path``."""
    folder, name = os.path.split(path)
    found = os.listdir(folder or os.curdir) if os.path.isdir(folder or os.curdir) else []
    return [os.path.join(folder, entry) for entry in found if owner_of_part(entry) == name]


def remove_parts(path: str, but: str = "") -> None:
    """Remove the folders with further files of ``path``, except the folder ``but``. Raises OSError."""
    for folder in part_folders(path):
        if os.path.basename(folder) != os.path.basename(but):
            shutil.rmtree(folder)


def _files_in(folder: str) -> list[str]:
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
