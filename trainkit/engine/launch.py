"""Start the processes of a run, or join those of torchrun."""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.rendezvous import rendezvous

from trainkit.utils import comm
from trainkit.utils.device import accelerator_runs_ahead
from trainkit.utils.env import stop_signals
from trainkit.utils.errors import ConfigError

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others before it fails."""

# the variables that torchrun sets
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# "True": the process that starts the ranks has the store
_SHARES_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_NUM_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
_STOPPED = tuple(128 + number for number in _SIGNALS)  # exit codes of runs that they have stopped


def is_restarted() -> bool:
    """Whether torchrun has restarted this run, which then resumes.

    The same on all ranks under `launch`.
    """
    return int(os.environ.get(_NUM_RESTARTS, "0")) > 0


def launch(
    main_func: Callable[..., Any],
    num_gpus_per_machine: int,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str | None = None,
    args: tuple[Any, ...] = (),
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Any:
    """Call ``main_func(*args)`` in every process of the run.

    Returns its result if no process is started. Under torchrun the process exists already, and the
    other arguments are not needed. Otherwise this machine gets ``num_gpus_per_machine`` new
    processes, each with a GPU if there are enough; a run of one process is this process. With 0 it
    is on the CPU. A signal that stops a run is passed on to new processes.

    Args:
        main_func: a function of a module, so that a new process can import it.
        dist_url: where rank 0 listens, ``tcp://host:port``; "auto" or None is a free port of this
            machine.

    Raises:
        ConfigError: as `check_launch`, without torchrun.
        SystemExit: a process exited with this code; 128 plus its number if a signal has stopped the
            run.
    """
    if is_torchrun():
        return run_rank(main_func, args, timeout)
    address = check_launch(num_gpus_per_machine, num_machines, machine_rank, dist_url)
    world_size = num_machines * num_gpus_per_machine
    if world_size <= 1:
        return main_func(*args)
    variables = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(num_gpus_per_machine)}
    if address is None:
        # port 0: a free one
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        variables[_SHARES_STORE] = "True"
        host, port = store.host, store.port
    else:
        host, port = address
    variables["MASTER_ADDR"] = host
    variables["MASTER_PORT"] = str(port)
    first_rank = machine_rank * num_gpus_per_machine
    _start((first_rank, variables, main_func, args, timeout), num_gpus_per_machine)
    return None


def is_torchrun() -> bool:
    """Whether torchrun, or a scheduler in its way, has started this process."""
    return all(name in os.environ for name in _TORCHRUN)


def check_launch(
    num_gpus: int, num_machines: int, machine_rank: int, dist_url: str | None
) -> tuple[str, int] | None:
    """The host and the port where rank 0 listens; None: any port of this machine.

    Raises:
        ConfigError: the counts or the address are impossible, or the machine has too few devices.
    """
    smallest = 1 if num_machines > 1 else 0
    if num_gpus < smallest or not 0 <= machine_rank < num_machines:
        got = f"{num_gpus}, {machine_rank} and {num_machines}"
        raise ConfigError(
            f"num_gpus (0: the CPU), machine_rank and num_machines: got {got}; start at 0, 0 and 1"
        )
    found = _num_devices()
    if 0 < found < num_gpus:
        raise ConfigError(f"num_gpus is {num_gpus}, but this machine has {found} GPUs")
    if dist_url in (None, "auto") and num_machines == 1:
        return None
    accepted = f"dist_url: got {dist_url!r}; accepted: tcp://HOST:PORT, and auto for one machine"
    try:
        url = urlsplit(dist_url or "")
        port = url.port
    except ValueError as error:  # the port is no number, or too large
        raise ConfigError(accepted) from error
    if url.scheme != "tcp" or not url.hostname or not port:
        raise ConfigError(accepted)
    return url.hostname, port


def _start(arguments: tuple[Any, ...], num: int) -> None:
    """Call ``_start_rank(i, *arguments)`` in ``num`` new processes, and wait for them."""
    # without it a spawned process spawns its loader workers too, and each of them imports torch
    default_method = multiprocessing.get_all_start_methods()[0]
    worker_method = multiprocessing.get_start_method(allow_none=True) or default_method
    arguments = (worker_method, *arguments)
    context: Any = mp.start_processes(_start_rank, arguments, num, join=False, start_method="spawn")
    received: list[int] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        # not SIGINT and SIGHUP: a terminal sends them to all processes, and a second SIGINT is no
        # request
        passed_on = signum if signum == signal.SIGUSR1 else signal.SIGTERM
        for process in context.processes:
            if process.is_alive():
                os.kill(process.pid, passed_on)

    former = {}
    for each in stop_signals():
        if signal.getsignal(each) not in (None, signal.SIG_IGN):
            former[each] = signal.signal(each, pass_on)
    try:
        while not context.join(grace_period=3.0):
            pass
    except mp.ProcessExitedException as error:  # with an exit code it has printed its error
        exit_code = 128 + received[0] if received else error.exit_code
        if exit_code < 0:
            raise
        sys.exit(exit_code)
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)


def _start_rank(
    local_rank: int,
    worker_method: str,
    first_rank: int,
    variables: dict[str, str],
    *arguments: Any,
) -> None:
    multiprocessing.set_start_method(worker_method, force=True)
    os.environ.update(variables, RANK=str(first_rank + local_rank), LOCAL_RANK=str(local_rank))
    run_rank(*arguments)


def run_rank(main_func: Callable[..., Any], args: tuple[Any, ...], timeout: timedelta) -> Any:
    """Call ``main_func(*args)`` in the process group that torchrun's variables describe.

    Returns its result.
    """
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    store = _join_process_group(rank, world_size, timeout)
    result = None
    exit_code: Any = 0
    try:
        result = record(main_func)(*args)  # writes torchrun's error file
    except (KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit):
            exit_code = error.code or 0
        else:
            exit_code = 128 + signal.SIGINT
        if exit_code not in (0, *_STOPPED):
            raise
        # another rank may still write, and the first that exits ends all
        store.set(f"stopped/{rank}", "")
        of_all = [f"stopped/{other}" for other in range(world_size)]
        with contextlib.suppress(dist.DistError):
            store.wait(of_all, timedelta(seconds=60))
    except Exception:
        # so that the others fail later: torchrun, which compares seconds, then names this rank
        time.sleep(1.1)
        raise
    # not after a failure: other ranks would fail without the group, before this rank can report its
    # error
    _leave_process_group()
    if exit_code:
        sys.exit(exit_code)
    return result


def _join_process_group(rank: int, world_size: int, timeout: timedelta) -> Any:
    """Make the default process group; returns its store."""
    num_restarts = int(os.environ.get(_NUM_RESTARTS, "0"))
    device = _own_device()
    backend = "gloo"
    if device is not None:
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    # torchrun keeps one store for all starts, and it has the addresses of earlier ones
    store = dist.PrefixStore(f"start {num_restarts}", store)
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world_size,
        store=store,
        timeout=timeout,
        device_id=device,
    )
    largest = max(comm.all_gather(num_restarts))  # nodes count their own
    os.environ[_NUM_RESTARTS] = str(largest)
    return store


def _leave_process_group() -> None:
    # DDP is a cycle that keeps the group alive; its thread must end before the interpreter
    gc.collect()
    dist.destroy_process_group()
    time.sleep(0.05)  # a Gloo thread may still release tensors, for which it needs the interpreter


def _num_devices() -> int:
    """The accelerators of this machine that the host runs ahead of; only these are used."""
    if not accelerator_runs_ahead():
        return 0
    return torch.accelerator.device_count()


def _own_device() -> torch.device | None:
    """The GPU of this process, made the current one.

    None, for the CPU, if there are fewer GPUs than processes.
    """
    index = int(os.environ["LOCAL_RANK"])
    found = _num_devices()
    if found == 1 and "SLURM_PROCID" in os.environ:  # SLURM may show each task only its own GPU
        index = 0
    elif found < int(os.environ["LOCAL_WORLD_SIZE"]):
        return None
    torch.accelerator.set_device_index(index)
    return torch.device(str(torch.accelerator.current_accelerator()), index)
