"""The start of a loader worker, before it loads data."""

import multiprocessing
import os
import signal
import threading

import torch
from torch.utils.data import get_worker_info

from trainkit.utils.env import seed_all_rng, stop_signals

_POLL_SEC = 5.0  # interval of the checks whether the parent is alive


def worker_init_reset_seed(worker_id: int) -> None:
    """Seed Python, NumPy and torch in a loader worker, and make it ignore signals except a SIGTERM from its parent.

    A terminal, a scheduler and torchrun send signals to all processes, but a run that is stopped still needs batches
    for its last step. Any ``DataLoader`` can have this as ``worker_init_fn``.
    """
    seed_all_rng((torch.initial_seed() + worker_id) % 2**32)
    if get_worker_info() is not None and hasattr(signal, "sigtimedwait"):  # macOS, Windows: the sender is unknown
        signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
        threading.Thread(target=_end_with_creator, args=(os.getppid(),), daemon=True).start()


def _end_with_creator(born_to: int) -> None:
    """End this worker if the process that created it sends SIGTERM or has died."""
    creator = multiprocessing.parent_process()  # not `born_to`: with forkserver that is the server, which lives on
    assert creator is not None
    while os.getppid() == born_to and creator.is_alive():
        received = signal.sigtimedwait({signal.SIGTERM}, _POLL_SEC)
        if received is not None and received.si_pid == creator.pid:
            break
    os._exit(0)
