"""Runs that torchrun starts again: where their ranks meet, and how they know."""

import contextlib
import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from trainkit.utils import comm

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_IS_RESTARTED = "TRAINKIT_IS_RESTARTED"
_PORT, _WORLD_SIZE, _HAS_BEGUN = "trainkit/port", "trainkit/world_size", "trainkit/has_begun"


def is_restarted() -> bool:
    """Whether torchrun has started the processes of this run again; below `launch` the same on all ranks.

    The run is then to go on from its last checkpoint, whatever the command says. A start that has failed before its
    `note_begin` does not count: what lies in the output folder may be another run's.
    """
    return bool(int(os.environ.get(_IS_RESTARTED) or os.environ.get(_RESTARTS, "0")))


def note_begin() -> None:
    """The output folder is that of this run now, so that a later start of it goes on; every rank may call it."""
    if _has_agent_store() and comm.is_main_process():
        _agent_store(timedelta(minutes=1)).set(_HAS_BEGUN, "1")


def make_store(url: str, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Where the ranks of this start meet; every rank calls it.

    The store of torchrun's agent is not used for that: it keeps what the processes of an earlier start have put there,
    such as their addresses, for which those of the next one then wait. It tells the port of a store of rank 0.
    """
    if url != "env://" or not _has_agent_store():
        store, _, _ = next(rendezvous(url, rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        return store
    agent_store, host = _agent_store(timeout), os.environ["MASTER_ADDR"]
    if rank > 0:
        return _join(agent_store, host, rank, world_size, timeout)
    # not by torchrun's count, which leaves out restarts because of new nodes
    os.environ[_IS_RESTARTED] = str(int(agent_store.check([_HAS_BEGUN])))
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    store.set(_WORLD_SIZE, str(world_size))
    agent_store.set(_PORT, str(store.port))
    return store


def _join(agent_store: dist.Store, host: str, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store of rank 0, as soon as the port is that of this start."""
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        port = int(agent_store.get(_PORT))
        with contextlib.suppress(ConnectionError, dist.DistNetworkError):  # rank 0 of an earlier start has ended
            socket.create_connection((host, port), timeout.total_seconds()).close()  # torch tries for seconds
            store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
            is_of_this_size = store.get(_WORLD_SIZE) == str(world_size).encode()
            if is_of_this_size and store.add(f"trainkit/joined_{rank}", 1) == 1:  # else it is there still
                return store
        time.sleep(0.05)
    raise TimeoutError(
        f"rank 0 has not opened a store on {host} within {timeout}; look at its log, and whether its port is reached"
    )


def agree_on_restarts() -> None:
    """Let all ranks know what rank 0 knows; every rank calls it."""
    if is_restarted := comm.broadcast(os.environ.get(_IS_RESTARTED)):
        os.environ[_IS_RESTARTED] = is_restarted


def _has_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _agent_store(timeout: timedelta) -> dist.Store:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=timeout)
