"""Processes: those of torchrun, or our own on one or several machines."""

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
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from trainkit.engine.elastic import meeting
from trainkit.engine.stopping import StopRequests
from trainkit.utils import comm

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others before it gives up."""

_STOPPED = (143, 129, 130)  # exit codes of a run that SIGTERM, SIGHUP or SIGINT has stopped
_PATIENCE_SEC = 30.0  # after which a rank says what it waits for
_GRACE_SEC = 10.0  # between the SIGTERM and the SIGKILL to processes that have lost another one
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
    """Call ``main_func(*args)`` in every process of the run; returns the result of this one, or of the first spawned.

    Under torchrun this process is already one of the run, and the other arguments are not needed. Otherwise this
    machine gets ``num_gpus_per_machine`` processes, spawned if there are several in all; 0 is this process alone, which
    `default_setup` leaves on the CPU. With CUDA each has a device; tensors on it go over NCCL, those on the CPU over
    Gloo.

    SIGTERM, SIGHUP and SIGINT are passed on to the spawned processes as one SIGTERM; a second SIGINT kills them.

    Args:
        main_func: a function of a module, so that a new process can import it.
        machine_rank: number of this machine, from 0.
        dist_url: where rank 0 listens, such as ``tcp://host:port``; "auto" or None is a free port of this machine.
        timeout: of the process group.

    Raises:
        ValueError: the counts make no sense, the machine has too few devices, or several machines have no ``dist_url``.
        torch.multiprocessing.ProcessRaisedException: a process failed; its number and its traceback are in the text.
        torch.multiprocessing.ProcessExitedException: a process was killed, by the signal in the text.
        SystemExit: a process ended so, with its code; 143, 129 or 130 if SIGTERM, SIGHUP or SIGINT stopped the run.
    """
    if all(name in os.environ for name in _TORCHRUN):
        with _process_group("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout):
            result, exit_code = _result_or_stop(main_func, args)
        if exit_code:
            sys.exit(exit_code)
        return result
    check_processes(num_gpus_per_machine, num_machines, machine_rank, dist_url)
    world_size = num_machines * num_gpus_per_machine
    if world_size <= 1:
        return main_func(*args)
    if dist_url in (None, "auto"):
        dist_url = f"tcp://127.0.0.1:{_free_port()}"
    return _spawn(num_gpus_per_machine, (main_func, world_size, machine_rank, dist_url, args, timeout))


def check_processes(num_gpus: int, num_machines: int, machine_rank: int, dist_url: str | None) -> None:
    """
    Raises:
        ValueError: `launch` cannot use these numbers.
    """
    if num_gpus < (num_machines > 1) or not 0 <= machine_rank < num_machines:
        raise ValueError(
            "need at least 1 process per machine (num_gpus; 0 for the CPU) and 0 <= machine_rank < num_machines, got "
            f"{num_gpus}, {machine_rank} and {num_machines}"
        )
    if num_machines > 1 and dist_url in (None, "auto"):
        raise ValueError("several machines need a dist_url that all of them reach, such as tcp://HOST:PORT")
    if 0 < torch.cuda.device_count() < num_gpus:
        raise ValueError(f"num_gpus is {num_gpus}, but this machine has {torch.cuda.device_count()} GPUs; lower it")


def _spawn(num_local: int, arguments: tuple[Any, ...]) -> Any:
    """Run ``_spawned_main`` in ``num_local`` new processes; the result of the first of them."""
    results = mp.get_context("spawn").SimpleQueue()
    stops = StopRequests()
    with stops.listening():
        context = mp.start_processes(
            _spawned_main,
            args=(num_local, results, *arguments),
            nprocs=num_local,
            join=False,
            start_method="spawn",
        )
        try:
            answers = _join(context, results, stops)
        except mp.ProcessExitedException as error:
            stop = stops.agree_now()
            if stop is not None and error.exit_code == -signal.SIGTERM:  # it did not listen, or not yet
                sys.exit(stop.exit_code)
            if error.exit_code > 0:  # its sys.exit is ours: what there was to say it has said
                sys.exit(error.exit_code)
            raise
        except mp.ProcessRaisedException as error:
            raise _first_failure(context, error) from None
        except KeyboardInterrupt:  # the second one
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
    """Wait for the processes, and pass a signal on to them; what they have put into ``results``."""
    answers: list[tuple[Any, int]] = []
    has_ended, passed_on = False, False
    while not has_ended:
        has_ended = context.join(timeout=0.5, grace_period=_GRACE_SEC)
        while not results.empty():  # a process cannot end before a large result is taken from it
            answers.append(results.get())
        if stops.pending and not passed_on:
            passed_on = True
            for process in context.processes:
                process.terminate()  # not by SIGINT: Ctrl-C reaches them too, and a second one is not a request
    return answers


def _first_failure(context: Any, error: mp.ProcessRaisedException) -> mp.ProcessRaisedException:
    """Of all that failed: a process that has lost another one fails as well, and may end before that one has."""
    failed = [(os.stat(file).st_mtime_ns, i) for i, file in enumerate(context.error_files) if os.path.exists(file)]
    _, first = min(failed)
    if first == error.error_index:
        return error
    with open(context.error_files[first], "rb") as file:
        trace = pickle.load(file)  # torch's _wrap has written it
    text = f"\n\n-- Process {first} terminated with the following error:\n{trace}"
    return mp.ProcessRaisedException(text, first, context.processes[first].pid)


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
        result, exit_code = _result_or_stop(main_func, args)
    if local_rank == 0 or exit_code:
        results.put((result, exit_code))


def _result_or_stop(main_func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, int]:
    """What it returned, and 0; or None and the exit code, if it has exited without an error or a signal has stopped it.

    That is no failure: a launcher that sees one ends the other processes, and rank 0 may still be writing.
    """
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
            # a model may be on the CPU although there are GPUs, and Python objects always are
            backend = "gloo" if device is None else "cpu:gloo,cuda:nccl"
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device
            )
            comm.synchronize()  # the slowest start should not count against the timeout of the first real collective
            reminder.cancel()
            yield
    except BaseException as error:
        _tell_torchrun(error)
        raise
    finally:
        reminder.cancel()
    # Not after a failure: the process ends anyway, and the others should not fail of its leaving before it says why.
    gc.collect()  # DDP is a cycle that keeps the group; a thread of the group that outlives the interpreter aborts it
    dist.destroy_process_group()
    # Gloo's threads stay, and one may still be letting go of the last tensors, for which it needs the interpreter: it
    # aborts the process if that has ended meanwhile (seen in 1 of some 50 runs on a loaded machine)
    time.sleep(0.05)


def _own_device() -> torch.device | None:
    """The GPU of this process; None if the machine has fewer GPUs than processes, so that they use the CPU."""
    local_rank, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    num_devices = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if num_local <= num_devices:
        return torch.device("cuda", local_rank)
    # SLURM can show each task its own GPU alone
    return torch.device("cuda", 0) if num_devices == 1 and "SLURM_PROCID" in os.environ else None


def _tell_torchrun(error: BaseException) -> None:
    """Write its error file, as ``record`` of torch does; for an exit of `user_errors_exit` too."""
    if isinstance(error, SystemExit):
        error = error.__context__ or error
    if isinstance(error, Exception):
        get_error_handler().record_exception(error)
        # torchrun compares whole seconds to find the first failure, so the others, which fail of this one, do it later;
        # and until then they find the store of rank 0
        time.sleep(1.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
