"""Starts and restarts by torchrun: where the ranks of a start meet, and whether the run goes on."""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from trainkit.utils import comm

_RESTARTED = "TRAINKIT_RESTARTED"
_STARTS, _OWNS_FOLDER = "trainkit/starts", "trainkit/owns_folder"

_agent_store: dist.Store | None = None  # that of torchrun, which outlives a start
_store: dist.Store | None = None  # of the ranks of this start


def is_restarted() -> bool:
    """Whether torchrun has started the processes of this run again; the same on all ranks under `launch`.

    The run then goes on from its last checkpoint. It does not if no earlier start has come to `note_begin`: the output
    folder may hold another run.
    """
    return bool(int(os.environ.get(_RESTARTED) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def note_begin() -> None:
    """The output folder belongs to this run now, so a later start goes on; every rank may call it."""
    if _agent_store is not None and comm.is_main_process():
        _agent_store.set(_OWNS_FOLDER, "1")


def is_first_to_fail() -> bool:
    """Whether no other rank has asked before: the first one speaks for all. True outside of `launch`."""
    try:
        return _store is None or _store.add("trainkit/failures", 1) == 1
    except dist.DistError:  # the store has ended with rank 0
        return True


@contextmanager
def meeting(url: str, rank: int, world_size: int, timeout: timedelta) -> Iterator[dist.Store]:
    """The store in which the ranks of this start meet; every rank enters it."""
    global _agent_store, _store
    store, _, _ = next(rendezvous(url, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    if url == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        os.environ[_RESTARTED] = str(int(store.check([_OWNS_FOLDER])))
        # it keeps the addresses of an earlier start, for which this one would wait
        _agent_store, number = store, _number_of_start(store, rank, world_size, timeout)
        store = dist.PrefixStore(f"trainkit/start_{number}", store)
    _store = store
    try:
        yield store
    finally:
        _agent_store = _store = None


def _number_of_start(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> int:
    """The same on all ranks. torchrun's own count differs between nodes, and leaves out restarts because of new ones.

    Rank 0 counts, and confirms the number to the ranks that have told it a name: the number that another rank finds
    at first may be that of an earlier start.
    """
    if rank == 0:
        number = store.add(_STARTS, 1)
        names = [store.get(f"{_STARTS}/{number}/{other}").decode() for other in range(1, world_size)]
        store.set(f"{_STARTS}/{number}/all", " ".join(names))
        return number
    name, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        key = f"{_STARTS}/{(number := store.add(_STARTS, 0))}"
        store.set(f"{key}/{rank}", name)
        if store.check([f"{key}/all"]) and name.encode() in store.get(f"{key}/all"):
            return number
        time.sleep(0.05)
    raise TimeoutError(f"rank {rank} has waited {timeout} for rank 0, which has not started; look at its log")
