"""One process of a run: its device, its process group, and its end."""

import contextlib
import gc
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.rendezvous import rendezvous

from trainkit.utils import comm
from trainkit.utils.device import runs_ahead

STOPPED = (143, 129, 130, 138)
"""Exit codes of a run that SIGTERM, SIGHUP, SIGINT or SIGUSR1 has stopped."""

SHARES_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True": the process that starts the ranks has the store
_NUM_RESTARTS = "TORCHELASTIC_RESTART_COUNT"


def is_restarted() -> bool:
    """Whether torchrun has restarted this run, which then resumes; the same on all ranks under `launch`."""
    return int(os.environ.get(_NUM_RESTARTS, "0")) > 0


def num_devices() -> int:
    """Number of GPUs that this process sees."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.device_count() if accelerator is not None and runs_ahead(accelerator) else 0


def run_rank(main_func: Callable[..., Any], args: tuple[Any, ...], timeout: timedelta) -> Any:
    """Call ``main_func(*args)`` in the process group that torchrun's variables describe; return its result.

    Raises:
        SystemExit: a signal has stopped ``main_func``; after all ranks have ended.
    """
    rank, world_size, result, exit_code = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, 0
    try:
        device, store = _own_device(), _meet(rank, world_size, timeout)
        backend = "gloo" if device is None else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        options: Any = {"store": store, "timeout": timeout, "device_id": device}
        dist.init_process_group(backend, rank=rank, world_size=world_size, **options)
        comm.synchronize()  # so that a slow start of a rank does not use up the timeout of the first collective
        try:
            result = record(main_func)(*args)  # writes torchrun's error file
        except (KeyboardInterrupt, SystemExit) as error:
            exit_code = getattr(error, "code", 128 + signal.SIGINT) or 0
            if exit_code not in (0, *STOPPED):
                raise
            store.set(f"stopped/{rank}", "")  # another rank may still write, and the first that exits ends all
            with contextlib.suppress(dist.DistError):
                store.wait([f"stopped/{other}" for other in range(world_size)], timedelta(seconds=60))
    except Exception:
        # The other ranks fail because of this one: later, so that torchrun, which compares seconds, names this one.
        time.sleep(1.1)
        raise
    # Not after a failure: other ranks would fail without the group, before this rank can report its error.
    gc.collect()  # DDP is a cycle that keeps the group alive; the group's thread must end before the interpreter
    dist.destroy_process_group()
    time.sleep(0.05)  # a Gloo thread may still release tensors, for which it needs the interpreter
    if exit_code:
        sys.exit(exit_code)
    return result


def _own_device() -> torch.device | None:
    """The GPU of this process, made the current one; None, for the CPU, if there are fewer GPUs than processes."""
    index, found = int(os.environ["LOCAL_RANK"]), num_devices()
    if found == 1 and "SLURM_PROCID" in os.environ:  # SLURM may show each task only its own GPU
        index = 0
    elif found < int(os.environ["LOCAL_WORLD_SIZE"]):
        return None
    torch.accelerator.set_device_index(index)
    return torch.device(str(torch.accelerator.current_accelerator()), index)


def _meet(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store of this start: torchrun keeps one store for all, which has the addresses of earlier starts.

    torchrun's number of restarts differs between nodes, so rank 0 counts the starts. The first number that another rank
    reads may be that of an earlier start: each rank sends a random name, and rank 0 confirms them under its number.
    """
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    if os.environ.get(SHARES_STORE) != "True":
        return store
    name, is_confirmed = uuid.uuid4().hex, False
    while not is_confirmed:
        number = store.add("starts", int(rank == 0))
        if rank == 0:
            names = [store.get(f"{number}/{other}").decode() for other in range(1, world_size)]
            store.set(f"{number}/all", " ".join([name, *names]))
        else:
            store.set(f"{number}/{rank}", name)
            time.sleep(0.02)
        is_confirmed = store.check([f"{number}/all"]) and name in store.get(f"{number}/all").decode()
    os.environ[_NUM_RESTARTS] = str(number - 1)
    return dist.PrefixStore(f"start {number}", store)
