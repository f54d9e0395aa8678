"""The start of a loader worker, before it loads data."""

import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils.data import get_worker_info

from trainkit.config.errors import ConfigError
from trainkit.utils.env import seed_all_rng, stop_signals

_MAX_SOCKET_PATH = 107  # limit of Linux, in bytes
_POLL_SEC = 5.0  # interval of the checks whether the parent is alive


def worker_init_reset_seed(worker_id: int) -> None:
    """Seed Python, NumPy and torch in a loader worker, and make it ignore signals except a SIGTERM from its parent.

    The seed comes from the loader. A terminal, a scheduler and torchrun send signals to the whole process group, but a
    run that is stopped still needs batches for its last step. Workers end when their loader ends them, or some seconds
    after their parent has died. SIGTERM is blocked in a worker and in programs that it starts.

    Loaders of this package use it; any other ``DataLoader`` can have it as ``worker_init_fn``.
    """
    seed_all_rng((torch.initial_seed() + worker_id) % 2**32)
    if get_worker_info() is not None and threading.current_thread() is threading.main_thread():
        _ignore_signals_to_the_group()


def check_socket_path() -> None:
    """
    Raises:
        ConfigError: the path of the socket over which a worker sends tensors would be too long. Then the worker's
            thread would fail, and the loader would wait for ever.
    """
    by_socket = sys.platform == "linux" and torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
    if not by_socket or hasattr(multiprocessing.util, "_SUN_PATH_MAX"):  # newer Python versions use a shorter folder
        return
    folder, longest = tempfile.gettempdir(), _MAX_SOCKET_PATH - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
    if (length := len(os.fsencode(folder))) > longest:
        raise ConfigError(
            f"loader workers cannot send what they load: the folder for temporary files, {folder}, has {length} "
            f"characters, but at most {longest} are possible; set TMPDIR to a shorter path, or DATALOADER.NUM_WORKERS "
            "to 0"
        )


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Context that blocks signals while workers start, so that no signal ends them before their init function."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_signals_to_the_group() -> None:
    ignored = stop_signals() - {signal.SIGTERM}
    for signum in ignored:
        signal.signal(signum, signal.SIG_IGN)
    if not hasattr(signal, "sigtimedwait"):  # macOS, Windows: the sender of a signal is unknown
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return
    # torch's handler would end the worker on a signal from any other sender; a blocked signal does not call it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
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
