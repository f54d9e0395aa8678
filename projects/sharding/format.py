"""The checkpoint format for sharded tensors, see `shards`."""

import contextlib
import itertools
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from trainkit.projects.sharding.shards import KEY, Shards, fill_shards, verify_shards

from trainkit.checkpoint.atomic import being_written, is_being_written
from trainkit.checkpoint.file import SUFFIX, UNREADABLE, peek_file, write_plain
from trainkit.checkpoint.format import FORMAT_REGISTRY, CheckpointFormat, owner_of_part, part_folder, remove_parts
from trainkit.checkpoint.ranks import together
from trainkit.checkpoint.state import Take, plain_state
from trainkit.utils import comm
from trainkit.utils.sharding import is_sharded, shard_like

_numbers = itertools.count()


class ShardedFormat(CheckpointFormat):
    """Sharded tensors in a folder beside the file, written by all ranks."""

    collective = True

    def __init__(self) -> None:
        # a group for each checkpointer, since two may write at the same time
        self._group_name = f"shards {next(_numbers)}"

    def accepts(self, state: Mapping[str, Any]) -> bool:
        return any(map(is_sharded, state["model"].values()))

    def prepare(self, state: Mapping[str, Any], take: Take | None = None) -> dict[str, Any]:
        # a new folder for each save: the old one is needed until this save is committed
        token = comm.broadcast(secrets.token_hex(4))
        shards = Shards(token, comm.side_group(self._group_name))

        def take_other(tensor: Tensor, path: str) -> Tensor:
            return shards.take(tensor, path, take) if is_sharded(tensor) else plain_state(tensor, path)

        return {**plain_state(dict(state), take=take, take_other=take_other), KEY: shards}

    def write(self, state: Mapping[str, Any], path: str) -> None:
        """Write the parts of all ranks, then the file that names them; an error is raised on every rank."""
        shards: Shards = state[KEY]
        folder = part_folder(path, KEY, shards.token)
        if comm.is_main_process():
            remove_strays(os.path.dirname(path))
        with being_written(folder):
            manifest = shards.write(folder)
            together(lambda: self._commit({**state, KEY: manifest}, path, folder), shards.group)

    def _commit(self, state: Mapping[str, Any], path: str, folder: str) -> None:
        if comm.is_main_process():
            write_plain(state, path)
            with contextlib.suppress(OSError):  # the next save tries again
                remove_parts(path, but=folder)

    def verify(self, state: Mapping[str, Any], path: str, *, part: int = 0, num_parts: int = 1) -> None:
        verify_shards(state, path, part=part, num_parts=num_parts)

    def fill(
        self, state: dict[str, Any], path: str, model: nn.Module | None = None, wanted: Iterable[str] = ("",)
    ) -> dict[str, Any]:
        return fill_shards(state, path, model, wanted)

    def adapt(self, weights: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        return {name: shard_like(weight, own.get(name)) for name, weight in weights.items()}


def remove_strays(folder: str) -> None:
    """Remove shard folders of killed saves, which no file names; no other process may write to ``folder``."""
    with contextlib.suppress(*UNREADABLE, AttributeError):  # leftovers only cost space; if a file is damaged, all stay
        found = {name: owner for name in os.listdir(folder) if (owner := owner_of_part(name))}
        found = {name: owner for name, owner in found.items() if not is_being_written(name)}
        count = Counter(found.values())
        files = {name: count[name] for name in os.listdir(folder) if name.endswith(SUFFIX)}
        # usually a file has one folder, with its own name; it is not read, since a run may have many files
        strays = {name for name, owner in found.items() if files.get(owner) != 1}
        for name in files if strays else ():
            if files[name] != 1:
                strays.discard(peek_file(os.path.join(folder, name)).get(KEY, {}).get("folder"))
        for name in strays:
            shutil.rmtree(os.path.join(folder, name))


@FORMAT_REGISTRY.register()
def shards() -> CheckpointFormat:
    """The builder for `FORMAT_REGISTRY`; its name is that of the entry in the file."""
    return ShardedFormat()
