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

from trainkit.engine.elastic import agree_on_restarts, make_store
from trainkit.engine.failures import GRACE_SEC, failing_together
from trainkit.engine.stopping import StopRequests
from trainkit.utils import comm

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others before it gives up."""

_STOPPED = (143, 129, 130)  # exit codes of a run that SIGTERM, SIGHUP or SIGINT has stopped
_PATIENCE_SEC = 30.0  # after which a rank says what it waits for
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

    SIGTERM, SIGHUP and SIGINT to this process reach the spawned ones as one SIGTERM, and it waits for them; a second
    SIGINT kills them.

    Args:
        main_func: a function of a module, so that a new process can import it.
        machine_rank: number of this machine, from 0.
        dist_url: where rank 0 listens, such as ``tcp://host:port``; "auto" or None is a free port of this machine.
        timeout: of the process group.

    Raises:
        ValueError: the counts make no sense, the machine has too few devices, or several machines have no ``dist_url``.
        torch.multiprocessing.ProcessRaisedException: a process failed; its number and its traceback are in the text.
        torch.multiprocessing.ProcessExitedException: a process was killed; its number and the signal are in the text.
        SystemExit: a process ended so, with its code; 143, 129 or 130 if SIGTERM, SIGHUP or SIGINT stopped the run.
    """
    if all(name in os.environ for name in _TORCHRUN):
        with _process_group("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout):
            result, exit_code = _result_or_stop(main_func, args)
        if exit_code:
            sys.exit(exit_code)
        return result
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
            f"{num_gpus_per_machine} processes were asked for, but this machine has {torch.cuda.device_count()} GPUs; "
            "lower num_gpus_per_machine"
        )
    return _spawn(num_gpus_per_machine, (main_func, world_size, machine_rank, dist_url, args, timeout))


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
        has_ended = context.join(timeout=0.5, grace_period=GRACE_SEC)  # and again, from SIGTERM to SIGKILL
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
    local_rank = int(os.environ["LOCAL_RANK"])
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(local_rank)
    waiting = threading.Timer(_PATIENCE_SEC, _say_what_is_awaited, (url, rank, world_size, timeout))
    waiting.daemon = True
    waiting.start()
    try:
        store = make_store(url, rank, world_size, timeout)
        dist.init_process_group(
            "nccl" if has_cuda else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        comm.synchronize()  # the slowest start should not count against the timeout of the first real collective
    except Exception:
        logger.error(
            "No process group for rank %d of %d: is %s to be reached from here, and have the others started?",
            rank,
            world_size,
            url,
        )
        raise
    finally:
        waiting.cancel()
    agree_on_restarts()
    with failing_together(store, rank, world_size):
        yield
    # Not after a failure: the process ends anyway, and the others should not fail of its leaving before it says why.
    gc.collect()  # DDP is a cycle that keeps the group; a thread of the group that outlives the interpreter aborts it
    dist.destroy_process_group()
    # Gloo's threads stay, and one may still be letting go of the last tensors, for which it needs the interpreter: it
    # aborts the process if that has ended meanwhile (seen in 1 of some 50 runs on a loaded machine)
    time.sleep(0.05)


def _say_what_is_awaited(url: str, rank: int, world_size: int, timeout: timedelta) -> None:
    address = url if url != "env://" else f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    logger.warning(
        "Rank %d waits at %s for the other processes; %d have to start and to reach it. It gives up after %s",
        rank,
        address,
        world_size,
        timeout,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
