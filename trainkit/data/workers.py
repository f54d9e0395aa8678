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
from multiprocessing.process import BaseProcess

import torch
from torch.utils.data import get_worker_info

from trainkit.config.errors import ConfigError
from trainkit.utils.env import seed_all_rng, stop_signals

_MAX_SOCKET_PATH = 107  # limit of Linux, in bytes


def worker_init_reset_seed(worker_id: int) -> None:
    """Seed Python, NumPy and torch in a loader worker, and make it ignore signals except a SIGTERM of its parent.

    The seed comes from the loader. A terminal, a scheduler and torchrun send signals to the whole process group, but a
    run that is stopped still needs batches for its last step. Workers end when their loader ends them, or some seconds
    after their parent has died. Programs started by a worker inherit the blocked SIGTERM.

    Loaders of this package use it; any other ``DataLoader`` can have it as ``worker_init_fn``.
    """
    seed_all_rng((torch.initial_seed() + worker_id) % 2**32)
    if get_worker_info() is not None and threading.current_thread() is threading.main_thread():
        _ignore_signals_to_the_group()


def check_socket_path() -> None:
    """
    Raises:
        ConfigError: the path of the socket over which a worker sends tensors would be too long. The worker's thread
            would fail, and the loader would wait for ever.
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
    """Block signals while workers start: they inherit this, so no signal ends them before their init function has
    run."""
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
    if not hasattr(signal, "sigwaitinfo"):  # macOS, Windows: the sender of a signal is unknown
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return
    # torch's handler checks the sender too, but ends the worker on a foreign signal; a blocked signal does not call it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
    threading.Thread(target=_exit_on_sigterm_of_parent, args=(os.getppid(),), daemon=True).start()
    creator = multiprocessing.parent_process()
    if creator is not None and creator.pid != os.getppid():
        # the parent is the fork server, which torch watches, but which lives as long as its children
        threading.Thread(target=_exit_behind, args=(creator,), daemon=True).start()


def _exit_behind(creator: BaseProcess) -> None:
    creator.join()
    os._exit(0)


def _exit_on_sigterm_of_parent(born_to: int) -> None:
    creator = multiprocessing.parent_process()  # not `born_to` if forkserver is used
    while True:
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
        is_orphan = os.getppid() != born_to
        if is_orphan or (creator is not None and sender == creator.pid):
            os._exit(0)
