"""Processes: those of torchrun, or our own on one or several machines."""

import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from trainkit.utils import comm

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(minutes=30)

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launch(
    main_func: Callable[..., Any],
    num_gpus_per_machine: int,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str | None = None,
    args: tuple[Any, ...] = (),
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Any:
    """Call ``main_func(*args)`` in every process of the run and return what it returned here, on the lowest rank.

    Under torchrun the process is one of the run's already and the other arguments are not needed. Otherwise this
    machine gets ``num_gpus_per_machine`` processes, spawned if there are several in all. CUDA takes NCCL and one
    device per process; without CUDA the processes are CPU processes and talk over Gloo.

    Args:
        main_func: a function of a module, so that a new process can import it.
        machine_rank: number of this machine, from 0.
        dist_url: where rank 0 listens, such as ``tcp://host:port``; "auto" or None is a free port of this machine.
        timeout: of the process group.

    Raises:
        ValueError: the counts make no sense, the machine has too few devices, or several machines have no ``dist_url``.
        torch.multiprocessing.ProcessRaisedException: a process failed; its number and its traceback are in the text.
        SystemExit: a process ended so, with its code.
    """
    if all(name in os.environ for name in _TORCHRUN):
        with _process_group("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout):
            return main_func(*args)
    world_size = num_machines * num_gpus_per_machine
    if num_gpus_per_machine < 1 or num_machines < 1 or not 0 <= machine_rank < num_machines:
        raise ValueError(
            "need num_gpus_per_machine >= 1, num_machines >= 1 and 0 <= machine_rank < num_machines, got "
            f"{num_gpus_per_machine}, {num_machines} and {machine_rank}"
        )
    if world_size == 1:
        return main_func(*args)
    if dist_url in (None, "auto"):
        if num_machines > 1:
            raise ValueError("several machines need a dist_url that all of them reach, such as tcp://host:port")
        dist_url = f"tcp://127.0.0.1:{_free_port()}"
    if torch.cuda.is_available() and num_gpus_per_machine > torch.cuda.device_count():
        raise ValueError(
            f"{num_gpus_per_machine} processes were asked for, but this machine has {torch.cuda.device_count()} GPUs"
        )
    return _spawn(num_gpus_per_machine, (main_func, world_size, machine_rank, dist_url, args, timeout))


def _spawn(num_local: int, arguments: tuple[Any, ...]) -> Any:
    """Run ``_spawned_main`` in ``num_local`` new processes; the result of the first of them."""
    results = mp.get_context("spawn").SimpleQueue()
    processes = mp.start_processes(
        _spawned_main,
        args=(num_local, results, *arguments),
        nprocs=num_local,
        join=False,
        start_method="spawn",
    )
    result = None
    try:
        while not processes.join(timeout=0.5):
            if not results.empty():  # a process cannot end before a large result is taken from it
                result = results.get()
    except mp.ProcessExitedException as error:
        if error.exit_code > 0:  # its sys.exit is ours: what there was to say it has said
            sys.exit(error.exit_code)
        raise
    return result if results.empty() else results.get()


def _spawned_main(
    local_rank: int,
    num_local: int,
    results: Any,
    main_func: Callable[..., Any],
    world_size: int,
    machine_rank: int,
    dist_url: str,
    args: tuple[Any, ...],
    timeout: timedelta,
) -> None:
    # what torchrun sets as well: comm reads it
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(local_rank), str(num_local)
    with _process_group(dist_url, machine_rank * num_local + local_rank, world_size, timeout):
        result = main_func(*args)
    if local_rank == 0:
        results.put(result)


@contextmanager
def _process_group(url: str, rank: int, world_size: int, timeout: timedelta) -> Iterator[None]:
    local_rank = int(os.environ["LOCAL_RANK"])
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(local_rank)
    try:
        dist.init_process_group(
            "nccl" if has_cuda else "gloo", init_method=url, rank=rank, world_size=world_size, timeout=timeout
        )
    except Exception:
        logger.error("No process group at %s for rank %d of %d", url, rank, world_size)
        raise
    comm.synchronize()  # the slowest start should not count against the timeout of the first real collective
    yield
    # Not after a failure: the process ends anyway, and the others should not fail of its leaving before it says why.
    gc.collect()  # DDP is a cycle that keeps the group; a thread of the group that outlives the interpreter aborts it
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
