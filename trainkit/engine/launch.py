"""Start the processes of a run, or join those of torchrun."""

import contextlib
import gc
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
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
from trainkit.utils.device import runs_ahead
from trainkit.utils.env import stop_signals

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others before it fails."""

_STOPPED = (143, 129, 130, 138)  # exit codes of a run stopped by SIGTERM, SIGHUP, SIGINT, SIGUSR1
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUM_RESTARTS, _SHARES_STORE = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"


def is_restarted() -> bool:
    """Whether torchrun has restarted this run, which then resumes; the same on all ranks under `launch`."""
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
    """Call ``main_func(*args)`` in every process of the run; returns its result if no process is started.

    Under torchrun the process exists already, and the other arguments are not needed. Otherwise this machine gets
    ``num_gpus_per_machine`` new processes, each with a GPU if there are enough; a run of one process is this process.
    With 0 it is on the CPU. A signal that stops a run is passed on to new processes; a second one kills them.

    Args:
        main_func: a function of a module, so that a new process can import it.
        dist_url: where rank 0 listens, ``tcp://host:port``; "auto" or None is a free port of this machine.
        timeout: the timeout of the process group.

    Raises:
        ValueError: the counts or the address are impossible, or the machine has too few devices.
        torch.multiprocessing.ProcessRaisedException: a process failed; or ProcessExitedException: it was killed.
        SystemExit: a process exited with this code; 128 plus its number if a signal has stopped the run.
    """
    if all(name in os.environ for name in _TORCHRUN):
        return _run_rank(main_func, args, timeout)
    check_processes(num_gpus_per_machine, num_machines, machine_rank, dist_url)
    world_size = num_machines * num_gpus_per_machine
    if world_size <= 1:
        return main_func(*args)
    variables = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(num_gpus_per_machine)}
    if dist_url in (None, "auto"):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # 0: a free port
        variables |= {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), _SHARES_STORE: "True"}
    else:
        url = urlsplit(dist_url)
        variables |= {"MASTER_ADDR": str(url.hostname), "MASTER_PORT": str(url.port)}
    first_rank, processes = machine_rank * num_gpus_per_machine, list[Any]()
    with _passing_on(processes) as received:
        arguments = (first_rank, variables, main_func, args, timeout)
        context = mp.start_processes(_start_rank, arguments, num_gpus_per_machine, join=False, start_method="spawn")
        processes += context.processes
        if received:  # while they started
            _send(processes, received[0])
        try:
            while not context.join(timeout=1.0, grace_period=3.0):
                pass
        except mp.ProcessExitedException as error:
            stopped = (*_STOPPED, -signal.SIGTERM, *([-signal.SIGKILL] if len(received) > 1 else []))
            if received and error.exit_code in stopped:
                sys.exit(128 + received[0])
            if error.exit_code > 0:  # the process has printed its error
                sys.exit(error.exit_code)
            raise
    return None


def check_processes(num_gpus: int, num_machines: int, machine_rank: int, dist_url: str | None) -> None:
    """Raises ValueError if `launch` cannot use these numbers and this address."""
    if num_gpus < (num_machines > 1) or not 0 <= machine_rank < num_machines:
        got = f"{num_gpus}, {machine_rank} and {num_machines}"
        raise ValueError(f"num_gpus (0: the CPU), machine_rank and num_machines: got {got}; start at 0, 0 and 1")
    url = urlsplit("" if dist_url in (None, "auto") else dist_url)
    if (num_machines > 1 or url.geturl()) and not (url.scheme == "tcp" and url.hostname and url.port):
        raise ValueError(f"dist_url: got {dist_url!r}; accepted: tcp://HOST:PORT, and auto for one machine")
    if 0 < (found := _num_devices()) < num_gpus:
        raise ValueError(f"num_gpus is {num_gpus}, but this machine has {found} GPUs")


@contextlib.contextmanager
def _passing_on(processes: list[Any]) -> Iterator[list[int]]:
    """Context in which a signal goes to the processes. The next one kills them: SIGINT, or another 2 s later.

    Yields the signals; a terminal may send several at once.
    """
    received, first = list[int](), list[float]()

    def handle(signum: int, frame: FrameType | None) -> None:
        if not first or signum == signal.SIGINT or time.monotonic() > first[0] + 2:
            received.append(signum)
            first.append(time.monotonic())
            _send(processes, signum if len(received) == 1 else signal.SIGKILL)

    heard = [each for each in stop_signals() if signal.getsignal(each) not in (None, signal.SIG_IGN)]
    former = {each: signal.signal(each, handle) for each in heard}
    try:
        yield received
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)


def _send(processes: list[Any], signum: int) -> None:
    # not SIGINT and SIGHUP: a terminal sends them to all processes, and a second SIGINT is no request
    signum = signal.SIGTERM if signum in (signal.SIGINT, getattr(signal, "SIGHUP", 0)) else signum
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signum)


def _start_rank(
    local_rank: int,
    first_rank: int,
    variables: dict[str, str],
    main_func: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: timedelta,
) -> None:
    os.environ.update(variables, RANK=str(first_rank + local_rank), LOCAL_RANK=str(local_rank))
    _run_rank(main_func, args, timeout)


def _run_rank(main_func: Callable[..., Any], args: tuple[Any, ...], timeout: timedelta) -> Any:
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
            if exit_code not in (0, *_STOPPED):
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


def _num_devices() -> int:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.device_count() if accelerator is not None and runs_ahead(accelerator) else 0


def _own_device() -> torch.device | None:
    """The GPU of this process, made the current one; None, for the CPU, if there are fewer GPUs than processes."""
    index, found = int(os.environ["LOCAL_RANK"]), _num_devices()
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
    if os.environ.get(_SHARES_STORE) != "True":
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
