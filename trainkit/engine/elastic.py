"""Starts and restarts by torchrun and SLURM: the store in which ranks meet, and whether the run resumes."""

import logging
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from trainkit.utils import comm

logger = logging.getLogger(__name__)

JOB_FILE = "slurm_job"
_RESTARTED = "TRAINKIT_RESTARTED"
_STARTS, _OWNS_FOLDER = "trainkit/starts", "trainkit/owns_folder"

_agent_store: dist.Store | None = None  # torchrun's store, which exists over several starts
_store: dist.Store | None = None  # the store of this start
_is_requeued = False


def is_restarted() -> bool:
    """Whether torchrun or SLURM has restarted this run; the same on all ranks under `launch`.

    The run then resumes from its last checkpoint. If no earlier start has reached `note_begin`, this is False, since
    the output folder may hold another run. A restart by SLURM is known after `default_setup`.
    """
    count = os.environ.get(_RESTARTED) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _is_requeued or bool(int(count))


def look_for_requeue(folder: str) -> None:
    """Find out whether SLURM has requeued this job, and this job wrote the run in ``folder``; every rank calls it."""
    global _is_requeued
    job, path = os.environ.get("SLURM_JOB_ID"), Path(folder, JOB_FILE)
    is_again = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
    _is_requeued = comm.broadcast(is_again and path.is_file() and path.read_text() == job)


def note_begin(folder: str = "") -> None:
    """Note that the output folder belongs to this run, so that a restart resumes; every rank may call it."""
    if not comm.is_main_process():
        return
    if _agent_store is not None:
        _agent_store.set(_OWNS_FOLDER, "1")
    if folder and (job := os.environ.get("SLURM_JOB_ID")):
        Path(folder, JOB_FILE).write_text(job)


def requeue_job() -> None:
    """Ask SLURM, if this is one of its jobs, to start it again; called on rank 0, after everything is on the disk."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip()
        logger.error("The SLURM job %s is not requeued: %s. Submit it again to continue the run", job, reason)
    else:
        logger.info("The SLURM job %s is requeued; it will continue from the last checkpoint", job)


def is_first_to_fail() -> bool:
    """Whether no other rank has called this before: the first rank reports for all. True outside of `launch`."""
    try:
        return _store is None or _store.add("trainkit/failures", 1) == 1
    except dist.DistError:  # rank 0 has ended, and the store with it
        return True


@contextmanager
def meeting(url: str, rank: int, world_size: int, timeout: timedelta) -> Iterator[dist.Store]:
    """Context with the store in which the ranks of this start meet; every rank enters it."""
    global _agent_store, _store
    store, _, _ = next(rendezvous(url, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    if url == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        os.environ[_RESTARTED] = str(int(store.check([_OWNS_FOLDER])))
        # without a prefix the store has the addresses of an earlier start, and this start would wait for them
        _agent_store, number = store, _number_of_start(store, rank, world_size, timeout)
        store = dist.PrefixStore(f"trainkit/start_{number}", store)
    _store = store
    try:
        yield store
    finally:
        _agent_store = _store = None


def _number_of_start(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> int:
    """The number of this start, the same on all ranks. torchrun's count differs between nodes and omits some restarts.

    Rank 0 counts. The first number that another rank reads may be that of an earlier start, so each rank sends a random
    name, and rank 0 confirms the names under its number.
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
