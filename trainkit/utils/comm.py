"""The rank of a process, and the exchange of Python objects between processes.

Without a process group there is one process.
"""

import weakref
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import distributed as dist

from trainkit.utils.plugins import lending

_T = TypeVar("_T")
# default group -> its side groups and data ranks, by name; it can be destroyed and made anew
_by_world: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Any]]" = (
    weakref.WeakKeyDictionary()
)
_alone: dict[str, Any] = {}  # the entries of a process without a group


def is_initialized() -> bool:
    """Whether this process belongs to a default process group."""
    return dist.is_available() and dist.is_initialized()


def _entries() -> dict[str, Any]:
    """The side groups and data ranks of the present default group."""
    if not is_initialized():
        return _alone
    default_group = cast(dist.ProcessGroup, dist.group.WORLD)
    return _by_world.setdefault(default_group, {})


def get_world_size() -> int:
    """Number of processes of the run."""
    if not is_initialized():
        return 1
    return dist.get_world_size()


def get_rank() -> int:
    """Number of this process in the run, from 0."""
    if not is_initialized():
        return 0
    return dist.get_rank()


def is_main_process() -> bool:
    """Whether this is rank 0."""
    return get_rank() == 0


def set_data_ranks(rank: int | None = None, num: int | None = None) -> None:
    """Say that this process has the data of rank ``rank`` of ``num``.

    None: each process has data of its own. Processes with one data rank have neighbouring ranks;
    all ranks call it.
    """
    if rank is None or num is None:
        _entries()["data ranks"] = None
    else:
        _entries()["data ranks"] = (rank, num)


def get_data_world_size() -> int:
    """Number of parts of a global batch.

    It is the number of processes, unless `set_data_ranks` says otherwise.
    """
    data_ranks = _entries().get("data ranks")
    if data_ranks is None:
        return get_world_size()
    _, num = data_ranks
    return cast(int, num)


def get_data_rank() -> int:
    """Number of this process's part of a global batch, from 0."""
    data_ranks = _entries().get("data ranks")
    if data_ranks is None:
        return get_rank()
    rank, _ = data_ranks
    return cast(int, rank)


def get_data_group_size() -> int:
    """Number of processes that compute the same part of a global batch together; usually 1."""
    return max(1, get_world_size() // get_data_world_size())


def create_side_groups() -> None:
    """Create the groups of `side_group`.

    Every rank calls it when a run starts, in the thread of the loop. Ranks wait for each other
    here. After the first backward pass they must not: if they used different parameters in it, the
    error that DDP raises in the next forward pass would become a hang.
    """
    if get_world_size() == 1:
        return
    purposes = ["requests", "metrics", "write_metrics"]
    if not _default_group_has_gloo():
        purposes.append("objects")
    entries = _entries()
    for purpose in purposes:
        if purpose not in entries:
            entries[purpose] = dist.new_group(backend="gloo")


def side_group(purpose: str) -> dist.ProcessGroup | None:
    """A Gloo group of all processes, so that two threads can exchange at once.

    None if there is one process.

    Args:
        purpose: "requests" (of the loop, for stops and saves), "metrics" or "write_metrics". If
            there was no run yet, the first call creates all of them, so every rank must make it.
    """
    if get_world_size() == 1:
        return None
    create_side_groups()
    return cast(dist.ProcessGroup, _entries()[purpose])


def _default_group_has_gloo() -> bool:
    return "cpu:gloo" in dist.get_backend_config()


def _object_group() -> dist.ProcessGroup | None:
    """A Gloo group of all processes, which exchanges objects without a device.

    None: the default group can do it.
    """
    if _default_group_has_gloo():
        return None
    return side_group("objects")


def synchronize() -> None:
    """Wait until all processes have called this."""
    if get_world_size() == 1:
        return
    if dist.get_backend_config() == "cuda:nccl":
        # without device_ids, NCCL would guess the device and warn
        dist.barrier(device_ids=[torch.cuda.current_device()])
    else:
        dist.barrier()


def all_gather(data: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """The ``data`` of every rank, in their order, on every rank.

    All ranks of the group must call it. ``data`` can be pickled, and has tensors only on the CPU.
    Default group: all processes, over Gloo.
    """
    if get_world_size() == 1:
        return [data]
    if group is None:
        group = _object_group()
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, data, group=group)
    return gathered


def gather(data: _T, dst: int = 0, group: dist.ProcessGroup | None = None) -> list[_T]:
    """As ``all_gather``, but only on rank ``dst`` of the run.

    Other ranks receive nothing; for them it is ``[]``.
    """
    if get_world_size() == 1:
        return [data]
    if group is None:
        group = _object_group()
    if get_rank() != dst:
        dist.gather_object(data, None, dst=dst, group=group)
        return []
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.gather_object(data, gathered, dst=dst, group=group)
    return gathered


def broadcast(data: _T, src: int = 0) -> _T:
    """The ``data`` of rank ``src``, which can be pickled, on every rank; all ranks must call it."""
    if get_world_size() == 1:
        return data
    objects: list[Any] = [None]
    if get_rank() == src:
        objects = [data]
    dist.broadcast_object_list(objects, src=src, group=_object_group())
    return cast(_T, objects[0])


def shared_random_seed() -> int:
    """A random number from 0 to 2**31 - 1, the same on all ranks.

    It is drawn from NumPy's global state. Every rank draws, so that equal random states stay equal.
    """
    seed = int(np.random.randint(2**31))
    return broadcast(seed)


def tree_sum(parts: Any) -> Any:
    """The sum over the first dimension of an array or a tensor.

    A power of two of them are added in one binary tree.
    """
    while len(parts) % 2 == 0:
        half = len(parts) // 2
        parts = parts[:half] + parts[half:]
    return parts.sum(0)


__getattr__, __dir__ = lending(__name__)
