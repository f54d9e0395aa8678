"""The checkpoint format for sharded tensors, see `shards`."""

import contextlib
import itertools
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from trainkit.projects.sharding.shards import KEY, Shards, fill_shards
from trainkit.projects.sharding.tensors import is_sharded

from trainkit.checkpoint.file import SUFFIX, Take, ordinary, plain_state, write_plain
from trainkit.checkpoint.format import FORMAT_REGISTRY, CheckpointFormat, owner_of_part
from trainkit.checkpoint.ranks import together
from trainkit.utils import comm

_numbers = itertools.count()


class ShardedFormat(CheckpointFormat):
    """Sharded tensors in a folder beside the file, written by all ranks.

    The folder of a save that was killed is removed by the next save of the same name.
    """

    collective = True

    def __init__(self) -> None:
        # a group for each checkpointer, since two may write at the same time
        self._group_name = f"shards {next(_numbers)}"

    def prepare(self, state: Mapping[str, Any], take: Take | None = None) -> dict[str, Any]:
        # a new folder for each save: the old one is needed until this save is committed
        shards = Shards(comm.broadcast(secrets.token_hex(4)), comm.side_group(self._group_name))
        copy = take or ordinary

        def take_any(tensor: Tensor, path: str) -> Tensor:
            return shards.take(tensor, path, copy) if is_sharded(tensor) else copy(tensor, path)

        return {**plain_state(dict(state), take=take_any), KEY: shards}

    def write(self, state: Mapping[str, Any], path: str) -> None:
        """Write the parts of all ranks, then the file that names them; an error is raised on every rank."""
        shards: Shards = state[KEY]
        folder = os.path.abspath(f"{path.removesuffix(SUFFIX)}.{KEY}-{shards.token}")
        manifest = shards.write(folder)
        together(lambda: self._commit({**state, KEY: manifest}, path, folder), shards.group)

    def _commit(self, state: Mapping[str, Any], path: str, folder: str) -> None:
        if comm.is_main_process():
            write_plain(state, path)
            with contextlib.suppress(OSError):  # the next save tries again
                for part in part_folders(path):
                    if part != folder:
                        shutil.rmtree(part)

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


@FORMAT_REGISTRY.register()
def shards(model: nn.Module | None) -> CheckpointFormat:
    """The builder for `FORMAT_REGISTRY`; its name is that of the entry in the file."""
    return ShardedFormat()
