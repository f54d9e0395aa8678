"""Functions on two ranks, or more, of one Gloo group."""

import datetime
import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

Check = Callable[[int, str], Any]

# params of a fixture: the tests that take it are slow
SLOW = [pytest.param(None, marks=pytest.mark.slow, id="ranks")]

# for processes of a fork server; torch._dynamo: which optimizers import with their first instance
IMPORTED_ONCE = [
    "trainkit.engine",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
]


def on_two_ranks(checks: Sequence[Check], folder: Path, num_ranks: int = 2) -> dict[str, list[Any]]:
    """Call ``check(rank, folder)`` for each of them: name -> [what it returned or raised on rank 0, on rank 1]."""
    # 0: any port that is free
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # a process that has imported torch forks them: each of them would take seconds for that
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED_ONCE)
    arguments = (list(checks), str(folder), store.port, num_ranks)
    multiprocessing.start_processes(
        _run_rank, arguments, nprocs=num_ranks, start_method="forkserver"
    )
    found = [
        torch.load(folder / f"rank{rank}.pth", weights_only=False) for rank in range(num_ranks)
    ]
    return {check.__name__: [by_check[check.__name__] for by_check in found] for check in checks}


def _run_rank(rank: int, checks: list[Check], folder: str, port: int, num_ranks: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # so that the collection after each check does not look through all modules
    # of the workers of loaders: others import torch anew
    multiprocessing.set_start_method("fork", force=True)
    timeout = datetime.timedelta(seconds=120)  # a loaded machine takes long to start a process
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    found = {}
    # each in a group of its own: one that hangs or fails leaves the others alone
    for check in checks:
        own = dist.PrefixStore(check.__name__, store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=num_ranks, timeout=timeout)
        has_failed = False
        try:
            found[check.__name__] = check(rank, folder)
        except Exception as error:
            found[check.__name__], has_failed = f"{type(error).__name__}: {error}", True
        if has_failed:  # now, since the others may wait for this rank until their timeout
            _end_group()
        # a group that ends while others are in the check can fail the next one
        own.set(f"{rank} is done", "")
        own.wait([f"{other} is done" for other in range(num_ranks)], timeout)
        _end_group()
        # a thread of Gloo that lets go of its last tensors now would abort the process at its end
        time.sleep(0.05)
    torch.save(found, os.path.join(folder, f"rank{rank}.pth"))


def _end_group() -> None:
    gc.collect()  # what still holds the group, as DDP's cycle of references does, can keep the next from starting
    if dist.is_initialized():
        dist.destroy_process_group()
