"""Sharded tensors of a checkpoint: each rank writes its part, by ``torch.distributed.checkpoint``.

The file ``model_0000099.pth`` holds everything else; each sharded tensor is in it as an empty tensor of its shape (on
the meta device). The content of these tensors is in the folder ``model_0000099.shards-<8 hex digits>``. The entry
``shards`` of the file has the name of the folder, and the sizes and digests of its files: torch reads them without
checksums. The folder is written first, under a new name each time. Replacing the file commits the save.
"""

import contextlib
import hashlib
import importlib
import os
import secrets
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from trainkit.projects.sharding.tensors import is_sharded, local_part, release_gathered

from trainkit.checkpoint.atomic import sync_folder
from trainkit.checkpoint.errors import CheckpointError
from trainkit.checkpoint.file import SUFFIX, Take, ordinary, plain_state, write_plain
from trainkit.checkpoint.folder import is_file_of
from trainkit.checkpoint.format import (
    FORMAT_REGISTRY,
    CheckpointFormat,
    owner_of_part,
    part_folders,
)
from trainkit.checkpoint.ranks import together
from trainkit.utils import comm
from trainkit.utils.file_io import refuse_pipe

KEY = "shards"


class Shards:
    """The sharded tensors of a state, ready to be written; `take` adds one."""

    def __init__(self, token: str = "", group: dist.ProcessGroup | None = None) -> None:
        """``token``: the end of the folder's name; nothing else may use ``group`` during `write`."""
        self.token = token
        self.group = group
        self._num_taken = 0
        self._local: dict[str, Tensor] = {}  # path in the state -> this rank's part
        self._layouts: dict[str, Any] = {}  # mesh, placements, global shape and stride

    def take(self, tensor: Any, path: str, copy: Take) -> Tensor:
        """Keep ``copy(part, path)`` of this rank's part of a tensor; returns an empty tensor in its place.

        Of the ranks with the same part, one keeps it: they take turns, so that each copies and writes its share.
        """
        mesh = tensor.device_mesh
        num_replicas = 1  # ranks with the same part
        own = 0  # the number of this rank among them
        dimensions = zip(tensor.placements, mesh.shape, mesh.get_coordinate(), strict=True)
        for placement, size, place in dimensions:
            if placement.is_replicate():
                num_replicas *= size
                own = own * size + place
        if self._num_taken % num_replicas == own:
            self._local[path] = copy(local_part(tensor).detach(), path)
            self._layouts[path] = (mesh.mesh, tensor.placements, tensor.shape, tensor.stride())
        self._num_taken += 1
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def write(self, folder: str) -> dict[str, Any]:
        """Write all shards; every rank calls it, in any thread. Returns the entry ``shards`` of the file.

        Raises CheckpointError, on every rank, if one of them cannot write.
        """
        dcp = _distributed("checkpoint")
        sharding = _distributed("tensor")
        tensors = {}
        for path, part in self._local.items():
            ranks, placements, shape, stride = self._layouts[path]
            # on the CPU, since the parts may be in host memory; nothing is exchanged over this mesh
            mesh = sharding.DeviceMesh("cpu", ranks, _init_backend=False)
            tensors[path] = sharding.DTensor.from_local(
                part.cpu(), mesh, placements, run_check=False, shape=shape, stride=stride
            )
        files: dict[str, tuple[int, str]] = {}
        error = ""
        try:
            # ranks exchange what differs from the last save
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            writer = dcp.FileSystemWriter(folder)
            dcp.save(tensors, storage_writer=writer, planner=planner, process_group=self.group)
            sync_folder(folder)
            sync_folder(os.path.dirname(folder))
            files = files_of(folder, f"__{comm.get_rank()}_*")
            if comm.is_main_process():
                files |= files_of(folder, ".metadata")
        except dcp.CheckpointException as failure:
            rank, (reason, _) = next(iter(failure.failures.items()))
            error = f"rank {rank}: {reason}"
        except OSError as failure:
            error = f"rank {comm.get_rank()}: {failure}"
        files_of_all: dict[str, tuple[int, str]] = {}
        errors = []
        for files_of_rank, error_of_rank in comm.all_gather((files, error), group=self.group):
            files_of_all |= files_of_rank
            if error_of_rank:
                errors.append(error_of_rank)
        if errors:
            shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(
                f"cannot write '{folder}': {errors[0]}. Checkpoints written before are unchanged"
            )
        return {"folder": Path(folder).name, "files": files_of_all}


def files_of(folder: str | os.PathLike[str], pattern: str = "*") -> dict[str, tuple[int, str]]:
    """name -> (size, SHA-256) of the files in the folder that fit the pattern."""
    found = {}
    for path in Path(folder).glob(pattern):
        found[path.name] = path.stat().st_size, _digest_of(path)
    return found


def _checked(manifest: Any, path: str) -> tuple[str, dict[str, tuple[int, str]]]:
    """The folder, and name -> (size, digest) of its files, from the entry ``shards`` of the file ``path``.

    Raises CheckpointError: the entry is malformed, or names files in other folders.
    """
    try:
        name = str(manifest["folder"])
        files = {}
        for file, (size, digest) in manifest["files"].items():
            files[str(file)] = int(size), str(digest)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise CheckpointError(
            f"'{path}' is damaged: its entry '{KEY}' has to name a folder and its files"
        ) from None
    parent = os.path.dirname(path)
    folder = os.path.join(parent, name)
    without_token = name[: -len("-01234567")]
    is_of_shards = owner_of_part(name) and without_token.endswith(f".{KEY}")
    is_beside = is_of_shards and is_file_of(parent, name)
    if not is_beside or not all(is_file_of(folder, file) for file in files):
        accepted = "a folder beside it, and files in that folder, no links out of it"
        raise CheckpointError(f"'{path}' is refused: its shards {name!r:.80} have to be {accepted}")
    return folder, files


def _layout_for_reading(model: nn.Module) -> Any:
    """A sharded tensor with a layout that suits all tensors of a checkpoint; None if the model is not sharded."""
    release_gathered(model)
    first: Any = next(filter(is_sharded, model.parameters()), None)
    if first is None or comm.get_data_group_size() == 1:
        return first
    sharding = _distributed("tensor")
    mesh = dist.init_device_mesh(first.device.type, (comm.get_world_size(),))
    return sharding.empty(1, device_mesh=mesh, placements=[sharding.Shard(0)])


@torch.no_grad()
def _empty_like(size: torch.Size, dtype: torch.dtype, like: Any) -> Tensor:
    """A tensor of global shape ``size`` with uninitialized values, sharded like ``like``; None: not sharded."""
    if like is None:
        return torch.empty(size, dtype=dtype, device="cpu")
    make = _distributed("tensor").empty
    empty: Tensor = make(
        size, dtype=dtype, device_mesh=like.device_mesh, placements=like.placements
    )
    return empty


def _digest_of(path: Path) -> str:
    sha256 = hashlib.sha256()
    refuse_pipe(path)
    with open(path, "rb") as file:
        data = file.read(1 << 20)
        while data:
            sha256.update(data)
            data = file.read(1 << 20)
    return sha256.hexdigest()


def _distributed(name: str) -> Any:
    """A module of torch.distributed; to import one takes almost as long as to import torch."""
    return importlib.import_module(f"torch.distributed.{name}")


class ShardedFormat(CheckpointFormat):
    """Sharded tensors in a folder beside the file, written by all ranks.

    The folder of a save that was killed is removed by the next save of the same name.
    """

    collective = True

    def __init__(self) -> None:
        # created by the first save; one for each checkpointer, since two may write at the same time
        self._group: dist.ProcessGroup | None = None

    def prepare(self, state: Mapping[str, Any], take: Take | None = None) -> dict[str, Any]:
        if self._group is None and comm.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")
        # a new folder for each save: the old one is needed until this save is committed
        shards = Shards(comm.broadcast(secrets.token_hex(4)), self._group)
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
        files = []
        for part in parts:
            files += [os.path.join(part, name) for name in sorted(os.listdir(part))]
        return [*files, path]

    def fill(
        self,
        state: dict[str, Any],
        path: str,
        model: nn.Module | None = None,
        wanted: Iterable[str] = ("",),
    ) -> dict[str, Any]:
        """As `CheckpointFormat.fill`; with a model, each rank verifies some of the files."""
        manifest = state.pop(KEY, None)
        if manifest is None:
            return state
        folder, files = _checked(manifest, path)
        like = None if model is None else _layout_for_reading(model)
        dcp = _distributed("checkpoint")
        reading = importlib.import_module("trainkit.projects.sharding.shard_reader")
        prefixes = tuple(wanted)
        found: dict[str, Tensor] = {}
        try:
            _verify(folder, files, is_shared=model is not None)
            reader = reading.ShardReader(folder, files)
            known = reader.read_metadata().state_dict_metadata

            def make(tensor: Tensor, place: str) -> Tensor:
                if not tensor.is_meta or place not in known or not place.startswith(prefixes):
                    return tensor
                found[place] = _empty_like(tensor.shape, tensor.dtype, like)
                return found[place]

            filled: dict[str, Any] = plain_state(state, take=make)
            with warnings.catch_warnings():
                # each rank reads by itself
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp.load(found, storage_reader=reader, no_dist=True)
        except (OSError, RuntimeError, TypeError, ValueError, dcp.CheckpointException) as error:
            reason: Any = error
            if isinstance(error, dcp.CheckpointException):
                reason, _ = next(iter(error.failures.values()))
            raise CheckpointError(
                f"cannot read the shards of '{path}' in '{folder}': {reason}"
            ) from error
        return filled


def _verify(folder: str, files: Mapping[str, tuple[int, str]], *, is_shared: bool) -> None:
    """Raises OSError: a file is not as it was written. ``is_shared``: each rank reads a part of the files."""
    for number, (name, (size, digest)) in enumerate(sorted(files.items())):
        file = Path(folder, name)
        is_own = not is_shared or number % comm.get_world_size() == comm.get_rank()
        is_intact = file.stat().st_size == size
        if is_intact and is_own:
            is_intact = digest == _digest_of(file)
        if not is_intact:
            raise OSError(f"'{file}' is damaged: its content does not match its digest")


@FORMAT_REGISTRY.register()
def shards(model: nn.Module | None) -> CheckpointFormat:
    """The builder for `FORMAT_REGISTRY`; its name is that of the entry in the file."""
    return ShardedFormat()
