"""Start the processes of a run, or join those of torchrun."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
import torch.multiprocessing as mp

from trainkit.engine.process import SHARES_STORE, num_devices, run_rank
from trainkit.utils.env import stop_signals

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others before it fails."""

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
        return run_rank(main_func, args, timeout)
    check_processes(num_gpus_per_machine, num_machines, machine_rank, dist_url)
    world_size = num_machines * num_gpus_per_machine
    if world_size <= 1:
        return main_func(*args)
    variables = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(num_gpus_per_machine)}
    if dist_url in (None, "auto"):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # 0: a free port
        variables |= {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), SHARES_STORE: "True"}
    else:
        url = urlsplit(dist_url)
        variables |= {"MASTER_ADDR": str(url.hostname), "MASTER_PORT": str(url.port)}
    _start((machine_rank * num_gpus_per_machine, variables, main_func, args, timeout), num_gpus_per_machine)
    return None


def check_processes(num_gpus: int, num_machines: int, machine_rank: int, dist_url: str | None) -> None:
    """Raises ValueError if `launch` cannot use these numbers and this address."""
    if num_gpus < (num_machines > 1) or not 0 <= machine_rank < num_machines:
        got = f"{num_gpus}, {machine_rank} and {num_machines}"
        raise ValueError(f"num_gpus (0: the CPU), machine_rank and num_machines: got {got}; start at 0, 0 and 1")
    url = urlsplit("" if dist_url in (None, "auto") else dist_url)
    if (num_machines > 1 or url.geturl()) and not (url.scheme == "tcp" and url.hostname and url.port):
        raise ValueError(f"dist_url: got {dist_url!r}; accepted: tcp://HOST:PORT, and auto for one machine")
    if 0 < (found := num_devices()) < num_gpus:
        raise ValueError(f"num_gpus is {num_gpus}, but this machine has {found} GPUs")


def _start(arguments: tuple[Any, ...], num: int) -> None:
    """Call ``_start_rank(i, *arguments)`` in ``num`` new processes, and wait for them."""
    processes: list[Any] = []
    with _passing_on(processes) as received:
        context = mp.start_processes(_start_rank, arguments, num, join=False, start_method="spawn")
        processes += context.processes
        if received:  # while they started
            _send(processes, received[0][0])
        try:
            while not context.join(timeout=1.0, grace_period=3.0):
                pass
        except mp.ProcessExitedException as error:  # with an exit code it has printed its error
            exit_code = 128 + received[0][0] if received else error.exit_code
            if exit_code < 0:
                raise
            sys.exit(exit_code)


@contextlib.contextmanager
def _passing_on(processes: list[Any]) -> Iterator[list[tuple[int, float]]]:
    """Context in which a signal goes to the processes. The next one kills them: SIGINT, or another 2 s later.

    Yields the signals and their times; a terminal may send several at once.
    """
    received: list[tuple[int, float]] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not received or signum == signal.SIGINT or now > received[0][1] + 2:
            received.append((signum, now))
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
    run_rank(main_func, args, timeout)
