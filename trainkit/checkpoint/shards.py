"""Sharded tensors of a checkpoint: each rank writes its part, by ``torch.distributed.checkpoint``.

The file ``model_0000099.pth`` holds everything else; each sharded tensor is in it as an empty tensor of its shape (on
the meta device). The content of these tensors is in the folder ``model_0000099.shards-<8 hex digits>``. The entry
``shards`` of the file has the name of the folder and the sizes and digests of its files. The folder is written first,
under a new name each time. Replacing the file commits the save.
"""

import contextlib
import importlib
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.checkpoint.atomic import CheckpointError, is_being_written, sync_folder
from trainkit.checkpoint.file import SUFFIX, UNREADABLE, is_file_of, peek_file, sha256_of
from trainkit.checkpoint.state import plain_state
from trainkit.utils import comm
from trainkit.utils.sharding import empty_like_shard, is_sharded, local_part

KEY = "shards"
FOLDER = re.compile(r"(.+)\.shards-[0-9a-f]{8}")


class Shards:
    """The sharded tensors of a state, ready to be written.

    Attributes:
        local: path in the state -> this rank's part; you may replace it by a copy in host memory.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.local: dict[str, Tensor] = {path: local_part(tensor) for path, tensor in tensors.items()}
        self._layouts = {  # mesh, placements, global shape and stride
            path: (tensor.device_mesh.mesh, tensor.placements, tensor.shape, tensor.stride())
            for path, tensor in tensors.items()
        }

    def __bool__(self) -> bool:
        return bool(self.local)

    def write(self, folder: str, group: dist.ProcessGroup | None) -> dict[str, Any]:
        """Write all shards; every rank calls it, in any thread. Nothing else may use ``group`` during the call.

        Returns:
            The entry ``shards`` of the file.

        Raises:
            CheckpointError: on every rank, if one of them cannot write.
        """
        dcp, sharding = _import_dcp(), importlib.import_module("torch.distributed.tensor")
        tensors = {}
        for path, part in self.local.items():
            ranks, placements, shape, stride = self._layouts[path]
            # on the CPU, since the parts may be in host memory; nothing is exchanged over this mesh
            mesh = sharding.DeviceMesh("cpu", ranks, _init_backend=False)
            tensors[path] = sharding.DTensor.from_local(
                part.cpu(), mesh, placements, run_check=False, shape=shape, stride=stride
            )
        files, error = {}, ""
        try:
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), process_group=group)
            files = _digest_own_files(folder)
            sync_folder(folder)
            sync_folder(os.path.dirname(folder))
        except dcp.CheckpointException as failure:
            rank, (reason, _) = next(iter(failure.failures.items()))
            error = f"rank {rank}: {reason}"
        except OSError as failure:
            error = f"rank {comm.get_rank()}: {failure}"
        by_rank = comm.all_gather((files, error), group=group)
        if errors := [text for _, text in by_rank if text]:
            raise CheckpointError(f"cannot write '{folder}': {errors[0]}. Checkpoints written before are unchanged")
        return {"folder": os.path.basename(folder), "files": {k: v for files, _ in by_rank for k, v in files.items()}}


def take_shards(state: dict[str, Any]) -> tuple[dict[str, Any], Shards]:
    """A copy of ``state`` with an empty tensor in place of each sharded tensor; and the sharded tensors.

    Raises:
        TypeError: as `plain_state`.
    """
    taken: dict[str, Tensor] = {}

    def take(tensor: Tensor, path: str) -> Tensor:
        if not is_sharded(tensor):
            return tensor
        taken[path] = tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return plain_state(state, take=take), Shards(taken)


def fill_shards(
    state: dict[str, Any], path: str, like: Tensor | None = None, wanted: Iterable[str] = ("",)
) -> dict[str, Any]:
    """Read the shards of a state that was read from the file ``path``; a rank may call it alone.

    Args:
        like: shard the tensors like this tensor; None: read whole tensors.
        wanted: read the tensors whose paths start with one of these; other tensors stay empty.

    Returns:
        A copy of ``state`` without its entry ``shards``; ``state`` itself if it has none.

    Raises:
        CheckpointError: the shards cannot be read.
    """
    manifest = state.pop(KEY, None)
    if manifest is None:
        return state
    folder, files = _checked(manifest, path)
    dcp, prefixes = _import_dcp(), tuple(wanted)
    found: dict[str, Tensor] = {}
    try:
        reader = importlib.import_module("trainkit.checkpoint.shard_reader").ShardReader(folder, files)
        known = reader.read_metadata().state_dict_metadata

        def make(tensor: Tensor, place: str) -> Tensor:
            if not tensor.is_meta or place not in known or not place.startswith(prefixes):
                return tensor
            found[place] = empty_like_shard(tensor.shape, tensor.dtype, like)
            return found[place]

        filled = plain_state(state, take=make)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank reads by itself on purpose
            dcp.load(found, storage_reader=reader, no_dist=True)
    except (OSError, RuntimeError, TypeError, ValueError, dcp.CheckpointException) as error:
        reason = next(iter(error.failures.values()))[0] if isinstance(error, dcp.CheckpointException) else error
        raise CheckpointError(f"cannot read the shards of '{path}' in '{folder}': {reason}") from error
    return filled


def verify_shards(state: Mapping[str, Any], path: str, *, part: int = 0, num_parts: int = 1) -> None:
    """Check that all shard files of a state exist, and check the content of some; ``path`` is the file of the state.

    Args:
        part, num_parts: compare the digests of every ``num_parts``-th file, starting with file ``part``; 0 parts: none.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    manifest = state.get(KEY)
    if manifest is None:
        return
    folder, files = _checked(manifest, path)
    if not os.path.isdir(folder):
        raise CheckpointError(
            f"'{path}' is one part of a checkpoint, but its shards '{os.path.basename(folder)}' are not in its "
            "folder; copy that folder too, or use the file that publish_weights writes"
        )
    for i, (name, (size, digest)) in enumerate(sorted(files.items())):
        file = os.path.join(folder, name)
        try:
            found = os.stat(file).st_size
            is_intact = not num_parts or i % num_parts != part or sha256_of(file) == digest
        except OSError as error:
            raise CheckpointError(f"'{path}' is damaged: its part '{file}' cannot be read: {error.strerror}") from error
        if found != size:
            raise CheckpointError(f"'{path}' is damaged: its part '{file}' holds {found:,} bytes of {size:,}")
        if not is_intact:
            raise CheckpointError(f"'{path}' is damaged: the content of its part '{file}' does not match its digest")


def remove_shards(path: str, *, but: str = "") -> None:
    """Remove the shard folders of the checkpoint file ``path``, except the folder ``but``.

    Raises:
        OSError: a folder cannot be removed.
    """
    folder, stem = os.path.dirname(path), os.path.basename(path).removesuffix(SUFFIX)
    for name, owner in _shard_folders(folder):
        if owner == stem and name != but:
            shutil.rmtree(os.path.join(folder, name))


def remove_stray_shards(folder: str) -> None:
    """Remove shard folders of killed saves, which no file names; no other process may write to ``folder``."""
    with contextlib.suppress(*UNREADABLE, AttributeError):  # leftovers only cost space; if a file is damaged, all stay
        found = {name: owner + SUFFIX for name, owner in _shard_folders(folder) if not is_being_written(name)}
        count = Counter(found.values())
        files = {name: count[name] for name in os.listdir(folder) if name.endswith(SUFFIX)}
        # usually a file has one folder, with its own name; it is not read, since a run may have many files
        strays = {name for name, owner in found.items() if files.get(owner) != 1}
        for name in files if strays else ():
            if files[name] != 1:
                strays.discard(peek_file(os.path.join(folder, name)).get(KEY, {}).get("folder"))
        for name in strays:
            shutil.rmtree(os.path.join(folder, name))


def _checked(manifest: Any, path: str) -> tuple[str, dict[str, tuple[int, str]]]:
    """The folder, and name -> (size, digest) of its files, from the entry ``shards`` of the file ``path``.

    Raises:
        CheckpointError: the entry is malformed, or names files in other folders.
    """
    try:
        name = str(manifest["folder"])
        files = {str(file): (int(size), str(digest)) for file, (size, digest) in manifest["files"].items()}
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise CheckpointError(
            f"'{path}' is damaged: its entry '{KEY}' has to name a folder and its files, got a "
            f"{type(manifest).__name__} that does not. Use another checkpoint"
        ) from None
    parent = os.path.dirname(path)
    folder = os.path.join(parent, name)
    is_beside = FOLDER.fullmatch(name) is not None and is_file_of(parent, name)
    if not is_beside or not all(is_file_of(folder, file) for file in files):
        raise CheckpointError(
            f"'{path}' is refused: its shards {name!r:.80} have to be a folder beside it, and files in that folder, no "
            "links out of it. Copy that folder to where the file is, or use another checkpoint"
        )
    return folder, files


def _shard_folders(folder: str) -> list[tuple[str, str]]:
    """(name of a shard folder, name of its checkpoint file without suffix)."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [(name, match[1]) for name in names if (match := FOLDER.fullmatch(name))]


def _digest_own_files(folder: str) -> dict[str, tuple[int, str]]:
    """name -> (size, digest) of the files that this rank has written."""
    begin = f"__{comm.get_rank()}_"
    names = [name for name in os.listdir(folder) if name.startswith(begin)]
    if comm.is_main_process():
        names.append(".metadata")
    paths = {name: os.path.join(folder, name) for name in names}
    return {name: (os.path.getsize(path), sha256_of(path)) for name, path in paths.items()}


def _import_dcp() -> Any:
    return importlib.import_module("torch.distributed.checkpoint")  # this import takes almost as long as that of torch
