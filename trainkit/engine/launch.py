"""Start the processes of a run, or join those of torchrun."""

import gc
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from trainkit.engine.elastic import meeting
from trainkit.engine.stopping import Stop, StopRequests
from trainkit.utils import comm

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others before it fails."""

_STOPPED = (143, 129, 130, 138)  # exit codes of a run stopped by SIGTERM, SIGHUP, SIGINT, SIGUSR1
_PATIENCE_SEC = 30.0  # after this time a rank logs that it waits
_GRACE_SEC = 10.0  # between SIGTERM and SIGKILL for the remaining processes after one has failed
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
    """Call ``main_func(*args)`` in every process of the run; returns the result of this or of the first new process.

    Under torchrun the process already exists, and the other arguments are not needed. Otherwise this machine gets
    ``num_gpus_per_machine`` new processes; if the run has one process, it is this one. With 0 the run is this process
    alone, and `default_setup` keeps it on the CPU. With CUDA each process has a device; tensors on it go over NCCL,
    those on the CPU over Gloo.

    SIGTERM, SIGHUP and SIGINT are passed on to the spawned processes as one SIGTERM; a second SIGINT kills them. In a
    SLURM job SIGUSR1 is passed on too.

    Args:
        main_func: a function of a module, so that a new process can import it.
        machine_rank: number of this machine, from 0.
        dist_url: where rank 0 listens, such as ``tcp://host:port``; "auto" or None is a free port of this machine.
        timeout: the timeout of the process group.

    Raises:
        ValueError: the counts are impossible, the machine has too few devices, or several machines have no
            ``dist_url``.
        torch.multiprocessing.ProcessRaisedException: a process failed; the text has its number and its traceback.
        torch.multiprocessing.ProcessExitedException: a process was killed by the signal in the text.
        SystemExit: a process exited with this code; 128 plus its number if a signal has stopped the run.
    """
    if all(name in os.environ for name in _TORCHRUN):
        world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        result, exit_code = _run_rank(main_func, args, "env://", world_size, timeout, rank)
        if exit_code:
            sys.exit(exit_code)
        return result
    check_processes(num_gpus_per_machine, num_machines, machine_rank, dist_url)
    world_size = num_machines * num_gpus_per_machine
    if world_size <= 1:
        return main_func(*args)
    if dist_url in (None, "auto"):
        dist_url = f"tcp://127.0.0.1:{_free_port()}"
    run = partial(_run_rank, main_func, args, dist_url, world_size, timeout)
    return _spawn(num_gpus_per_machine, machine_rank * num_gpus_per_machine, run)


def check_processes(num_gpus: int, num_machines: int, machine_rank: int, dist_url: str | None) -> None:
    """Raises ValueError if `launch` cannot use these numbers."""
    if num_gpus < (num_machines > 1) or not 0 <= machine_rank < num_machines:
        raise ValueError(
            "need at least 1 process per machine (num_gpus; 0 for the CPU) and 0 <= machine_rank < num_machines, got "
            f"{num_gpus}, {machine_rank} and {num_machines}"
        )
    if num_machines > 1 and dist_url in (None, "auto"):
        raise ValueError("several machines need a dist_url that all of them reach, such as tcp://HOST:PORT")
    if 0 < torch.cuda.device_count() < num_gpus:
        raise ValueError(f"num_gpus is {num_gpus}, but this machine has {torch.cuda.device_count()} GPUs; lower it")


def _spawn(num_local: int, first_rank: int, run: Callable[[int], tuple[Any, int]]) -> Any:
    """Call ``run(rank)`` in ``num_local`` new processes; return the result of the first."""
    results = mp.get_context("spawn").SimpleQueue()
    stops = StopRequests()
    with stops.listening(is_loop=False):
        context = mp.start_processes(
            _spawned_main,
            args=(num_local, first_rank, results, run),
            nprocs=num_local,
            join=False,
            start_method="spawn",
        )
        try:
            answers = _join(context, results, stops)
        except mp.ProcessExitedException as error:
            stop = stops.agree_now()
            if stop is not None and error.exit_code == -_passed_on(stop):  # the process had no handler yet
                sys.exit(stop.exit_code)
            if error.exit_code > 0:  # exit with the same code: the process has printed its error
                sys.exit(error.exit_code)
            raise
        except mp.ProcessRaisedException as error:
            raise _first_failure(context, error) from None
        except KeyboardInterrupt:  # the second Ctrl-C
            for process in context.processes:
                process.kill()
                process.join()
            sys.exit(128 + signal.SIGINT)
    stopped_with = [exit_code for _, exit_code in answers if exit_code]
    if stopped_with:
        stop = stops.agree_now()
        sys.exit(stopped_with[0] if stop is None else stop.exit_code)
    return answers[0][0]


def _join(context: Any, results: Any, stops: StopRequests) -> list[tuple[Any, int]]:
    """Wait for the processes and pass a signal on to them; return what they have put into ``results``."""
    answers: list[tuple[Any, int]] = []
    has_ended, passed_on = False, 0
    while not has_ended:
        has_ended = context.join(timeout=0.5, grace_period=_GRACE_SEC)
        while not results.empty():  # a process cannot end while its large result is in the queue
            answers.append(pickle.loads(results.get()))
        if stops.num_requests > passed_on:
            passed_on, stop = stops.num_requests, stops.agree_now()
            for process in context.processes:
                if stop is not None and process.is_alive():
                    os.kill(process.pid, _passed_on(stop))
    return answers


def _passed_on(stop: Stop) -> signal.Signals:
    """The signal to send to the processes; not SIGINT: Ctrl-C reaches them too, and a second SIGINT would kill them."""
    return signal.SIGUSR1 if stop.reason == "SIGUSR1" else signal.SIGTERM


def _first_failure(context: Any, error: mp.ProcessRaisedException) -> mp.ProcessRaisedException:
    """The earliest failure. Other processes fail because of it, and may end before it does."""
    failed = [(os.stat(file).st_mtime_ns, i) for i, file in enumerate(context.error_files) if os.path.exists(file)]
    _, first = min(failed)
    if first == error.error_index:
        return error
    with open(context.error_files[first], "rb") as file:
        trace = pickle.load(file)  # torch's _wrap has written it
    text = f"\n\n-- Process {first} terminated with the following error:\n{trace}"
    return mp.ProcessRaisedException(text, first, context.processes[first].pid)


def _spawned_main(
    local_rank: int, num_local: int, first_rank: int, results: Any, run: Callable[[int], tuple[Any, int]]
) -> None:
    # comm reads these variables, which torchrun sets too
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(local_rank), str(num_local)
    result, exit_code = run(first_rank + local_rank)
    if local_rank == 0 or exit_code:
        results.put(pickle.dumps((result, exit_code)))  # by value: the queue would pass on memory of this process


def _run_rank(
    main_func: Callable[..., Any], args: tuple[Any, ...], url: str, world_size: int, timeout: timedelta, rank: int
) -> tuple[Any, int]:
    """(result, 0), or (None, exit code) if a signal has stopped ``main_func`` or it has exited without an error.

    Such an exit must not look like a failure: the launcher would kill the other processes while rank 0 still writes.
    """
    with _process_group(url, rank, world_size, timeout):
        try:
            return main_func(*args), 0
        except KeyboardInterrupt:
            return None, 128 + signal.SIGINT
        except SystemExit as error:
            if error.code not in (None, 0, *_STOPPED):
                raise
            return None, error.code or 0


@contextmanager
def _process_group(url: str, rank: int, world_size: int, timeout: timedelta) -> Iterator[None]:
    device = _own_device()
    if device is not None:
        torch.cuda.set_device(device)
    address = url if url != "env://" else f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    text = "Rank %d waits at %s for the other processes; %d have to start and to reach it. It gives up after %s"
    reminder = threading.Timer(_PATIENCE_SEC, logger.warning, (text, rank, address, world_size, timeout))
    reminder.daemon = True
    reminder.start()
    try:
        with meeting(url, rank, world_size, timeout) as store:
            # GPU jobs need Gloo too: for Python objects and for models on the CPU
            backend = "gloo" if device is None else "cpu:gloo,cuda:nccl"
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device
            )
            comm.synchronize()  # so that a slow start of a rank does not use up the timeout of the first collective
            reminder.cancel()
            yield
    except BaseException as error:
        _tell_torchrun(error)
        raise
    finally:
        reminder.cancel()
    # Not after a failure: other ranks would fail without the group, before this rank can report its error.
    gc.collect()  # DDP is a cycle that keeps the group alive; the group's thread must end before the interpreter
    dist.destroy_process_group()
    # A Gloo thread may still release its last tensors, for which it needs the interpreter. Without this pause the
    # process aborted at exit (in 1 of some 50 runs on a loaded machine).
    time.sleep(0.05)


def _own_device() -> torch.device | None:
    """The GPU of this process; None, for the CPU, if the machine has fewer GPUs than processes."""
    local_rank, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    num_devices = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if num_local <= num_devices:
        return torch.device("cuda", local_rank)
    # SLURM may show each task only its own GPU
    return torch.device("cuda", 0) if num_devices == 1 and "SLURM_PROCID" in os.environ else None


def _tell_torchrun(error: BaseException) -> None:
    """Write torchrun's error file, like torch's ``record``; also for an exit by `user_errors_exit`."""
    if isinstance(error, SystemExit):
        error = error.__context__ or error
    if isinstance(error, Exception):
        get_error_handler().record_exception(error)
        # torchrun finds the first failure by whole seconds. The other ranks fail because of this rank: wait, so that
        # they fail later, and so that the store of rank 0 stays until then
        time.sleep(1.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
