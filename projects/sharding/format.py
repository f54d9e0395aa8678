"""The checkpoint format for sharded tensors, see `shards`."""

import contextlib
import itertools
import os
import pickle
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from trainkit.projects.sharding.shards import KEY, Shards, fill_shards
from trainkit.projects.sharding.tensors import is_sharded

from trainkit.checkpoint.atomic import sync_folder
from trainkit.checkpoint.file import SUFFIX, read_file, write_plain
from trainkit.checkpoint.format import FORMAT_REGISTRY, CheckpointFormat, owner_of_part
from trainkit.checkpoint.ranks import together
from trainkit.checkpoint.state import Take, ordinary, plain_state
from trainkit.utils import comm

_numbers = itertools.count()
_being_written: list[str] = []  # names of folders


class ShardedFormat(CheckpointFormat):
    """Sharded tensors in a folder beside the file, written by all ranks."""

    collective = True

    def __init__(self) -> None:
        # a group for each checkpointer, since two may write at the same time
        self._group_name = f"shards {next(_numbers)}"

    def prepare(self, state: Mapping[str, Any], take: Take | None = None) -> dict[str, Any]:
        # a new folder for each save: the old one is needed until this save is committed
        token = comm.broadcast(secrets.token_hex(4))
        shards = Shards(token, comm.side_group(self._group_name))

        def take_any(tensor: Tensor, path: str) -> Tensor:
            return (
                shards.take(tensor, path, take or ordinary) if is_sharded(tensor) else (take or ordinary)(tensor, path)
            )

        return {**plain_state(dict(state), take=take_any), KEY: shards}

    def write(self, state: Mapping[str, Any], path: str) -> None:
        """Write the parts of all ranks, then the file that names them; an error is raised on every rank."""
        shards: Shards = state[KEY]
        folder = os.path.abspath(f"{path.removesuffix(SUFFIX)}.{KEY}-{shards.token}")
        if comm.is_main_process():
            remove_strays(os.path.dirname(folder))
        _being_written.append(os.path.basename(folder))
        try:
            manifest = shards.write(folder)
            together(lambda: self._commit({**state, KEY: manifest}, path, folder), shards.group)
        finally:
            _being_written.remove(os.path.basename(folder))

    def _commit(self, state: Mapping[str, Any], path: str, folder: str) -> None:
        if comm.is_main_process():
            write_plain(state, path)
            sync_folder(os.path.dirname(folder))
            with contextlib.suppress(OSError):  # the next save tries again
                for part in part_folders(path):
                    if part != folder:
                        shutil.rmtree(part)

    def read(self, path: str) -> dict[str, Any]:
        return read_file(path)

    def files(self, path: str) -> list[str]:
        parts = part_folders(path)
        return [*(os.path.join(part, name) for part in parts for name in sorted(os.listdir(part))), path]

    def remove(self, path: str) -> None:
        os.remove(path)
        for part in part_folders(path):
            shutil.rmtree(part)

    def fill(
        self, state: dict[str, Any], path: str, model: nn.Module | None = None, wanted: Iterable[str] = ("",)
    ) -> dict[str, Any]:
        return fill_shards(state, path, model, wanted)


def part_folders(path: str) -> list[str]:
    """The folders with shards of the checkpoint ``path``."""
    folder, name = os.path.split(os.path.abspath(path))
    return [os.path.join(folder, entry) for entry in os.listdir(folder) if owner_of_part(entry) == name]


def remove_strays(folder: str) -> None:
    """Remove shard folders of killed saves, which no file names; no other process may write to ``folder``."""
    # leftovers only cost space; if a file is damaged, all stay
    damage = (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, pickle.UnpicklingError)
    with contextlib.suppress(*damage):
        found = {name: owner for name in os.listdir(folder) if (owner := owner_of_part(name))}
        found = {name: owner for name, owner in found.items() if name not in _being_written}
        count = Counter(found.values())
        files = {name: count[name] for name in os.listdir(folder) if name.endswith(SUFFIX)}
        # usually a file has one folder, with its own name; it is not read, since a run may have many files
        strays = {name for name, owner in found.items() if files.get(owner) != 1}
        for name in files if strays else ():
            if files[name] != 1:
                state = torch.load(os.path.join(folder, name), map_location="cpu", weights_only=True, mmap=True)
                strays.discard(state.get(KEY, {}).get("folder"))
        for name in strays:
            shutil.rmtree(os.path.join(folder, name))


@FORMAT_REGISTRY.register()
def shards(model: nn.Module | None) -> CheckpointFormat:
    """The builder for `FORMAT_REGISTRY`; its name is that of the entry in the file."""
    return ShardedFormat()
