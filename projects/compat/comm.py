"""detectron2's functions for the processes of one machine, and for tensors of all ranks."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.utils import comm

_groups: dict[Any, dist.ProcessGroup] = {}  # default group -> the group of this machine


def create_local_process_group(num_workers_per_machine: int) -> None:
    """Declare which processes share a machine: ranks 0 to n-1, n to 2n-1, and so on; all ranks must call it, once."""
    _groups.clear()
    _groups[dist.group.WORLD], _ = dist.new_subgroups(num_workers_per_machine)


def get_local_process_group() -> dist.ProcessGroup:
    """The group of the processes on this machine. Raises KeyError before `create_local_process_group`."""
    return _groups[dist.group.WORLD]


def get_local_rank() -> int:
    """Number of this process on its machine, from 0; without a local group by torchrun's LOCAL_RANK."""
    if dist.group.WORLD in _groups:
        return dist.get_rank(get_local_process_group())
    return int(os.environ.get("LOCAL_RANK", comm.get_rank()))


def get_local_size() -> int:
    """Number of processes on this machine; without a local group by torchrun's LOCAL_WORLD_SIZE."""
    if dist.group.WORLD in _groups:
        return dist.get_world_size(get_local_process_group())
    return int(os.environ.get("LOCAL_WORLD_SIZE", comm.get_world_size()))


def reduce_dict(input_dict: dict[str, Tensor], average: bool = True) -> dict[str, Tensor]:
    """Sum or mean of tensors over all ranks, by sorted names; all ranks call it with the same names and shapes.

    The bits are the same on every rank. It waits for the device, so do not use it in each step.
    """
    mine = {name: value.detach().cpu() for name, value in input_dict.items()}
    by_rank = comm.all_gather(mine)
    reduced = {}
    for name in sorted(input_dict):
        of_ranks = torch.stack([values[name] for values in by_rank])
        total = of_ranks.sum(dim=0)
        if average:
            total = total / len(by_rank)
        reduced[name] = total.to(input_dict[name].device)
    return reduced
