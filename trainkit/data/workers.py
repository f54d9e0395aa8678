"""Loader workers: how they start, their random state, and which signals end them."""

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils.data import get_worker_info

from trainkit.utils.env import seed_all_rng, stop_signals

_POLL_SEC = 5.0  # interval of a worker's checks whether its parent is alive


def worker_init_reset_seed(worker_id: int) -> None:
    """Seed Python, NumPy and torch in a loader worker.

    And make it ignore signals except a SIGTERM from its parent: a terminal, a scheduler and
    torchrun send signals to all processes, but a run that is stopped still needs batches for its
    last step. Any ``DataLoader`` with forked workers can have this as ``worker_init_fn``; others
    have threads of imports, which a signal may end.
    """
    is_in_worker = get_worker_info() is not None
    if is_in_worker:
        gc.freeze()  # what its parent has left is not for the worker to destroy, see `starting`
        gc.enable()
    seed_all_rng((torch.initial_seed() + worker_id) % 2**32)
    signals = _signals_with_sender()
    if is_in_worker and signals:
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


@contextmanager
def starting(start_method: str) -> Iterator[None]:
    """Context in which workers are started.

    Their threads block `stop_signals`. Garbage is not collected until `worker_init_reset_seed`: a
    forked worker has the garbage of its parent, such as a process group, but not the threads that
    the group would end, and crashes.
    """
    signals = _signals_with_sender()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    collects_garbage = gc.isenabled()
    gc.disable()
    try:
        if start_method != "fork":
            # now, since before Python 3.13 its start unblocks signals
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        yield
    finally:
        if collects_garbage:
            gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _signals_with_sender() -> set[signal.Signals]:
    """`stop_signals`, if a thread that waits for one can ask who has sent it.

    On macOS it cannot; then there are none.
    """
    if not hasattr(signal, "sigtimedwait"):
        return set()
    return stop_signals()


def _end_with_parent(born_to: int) -> None:
    """End this worker if its parent sends SIGTERM or has died."""
    parent: Any = multiprocessing.parent_process()
    # with fork, other workers keep open what tells that the parent is alive; with forkserver,
    # `born_to` is the server
    while parent.is_alive() and (os.getppid() == born_to or born_to != parent.pid):
        received = signal.sigtimedwait({signal.SIGTERM}, _POLL_SEC)
        if received is not None and received.si_pid == parent.pid:
            break
    os._exit(0)
