"""What happens in a loader worker before it loads anything."""

import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import torch
from torch.utils.data import get_worker_info

from trainkit.config.errors import ConfigError
from trainkit.utils.env import seed_all_rng

_MAX_SOCKET_PATH = 107  # bytes, of Linux


def worker_init_reset_seed(worker_id: int) -> None:
    """Seed Python, NumPy and torch in a loader worker, and keep signals from ending it, but for its parent's SIGTERM.

    The seed is that which the loader gave the worker. A terminal, a scheduler and torchrun signal the whole process
    group, while a run that is stopped still needs batches for its last step. Workers end when their loader lets them
    go, or some seconds after the death of their parent. Programs that a worker starts inherit the blocked SIGTERM.

    It is the ``worker_init_fn`` of this package's loaders, and may be that of any other ``DataLoader``.
    """
    seed_all_rng((torch.initial_seed() + worker_id) % 2**32)
    if get_worker_info() is not None and threading.current_thread() is threading.main_thread():
        _ignore_signals_to_the_group()


class WorkerInit:
    """`worker_init_reset_seed`, and then a function of the user's; a class, so that it can be pickled."""

    def __init__(self, user_function: Callable[[int], None] | None) -> None:
        self._user_function = user_function

    def __call__(self, worker_id: int) -> None:
        worker_init_reset_seed(worker_id)
        if self._user_function is not None:
            self._user_function(worker_id)


def check_socket_path() -> None:
    """
    Raises:
        ConfigError: the path of the socket over which a worker hands tensors to its loader would be too long: the
            thread of the worker that makes it would fail, and the loader would wait for ever.
    """
    by_socket = sys.platform == "linux" and torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
    if not by_socket or hasattr(multiprocessing.util, "_SUN_PATH_MAX"):  # a newer Python finds a shorter folder
        return
    folder, longest = tempfile.gettempdir(), _MAX_SOCKET_PATH - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
    if (length := len(os.fsencode(folder))) > longest:
        raise ConfigError(
            f"loader workers cannot hand over what they load: the folder for temporary files, {folder}, has {length} "
            f"characters, {longest} at most; set TMPDIR to a shorter path, or DATALOADER.NUM_WORKERS to 0"
        )


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Start workers that a signal cannot end before their init function has run: they inherit what is blocked here."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_signals_to_the_group() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGHUP"):  # Windows has none
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # macOS, Windows: without a way to see who has sent it
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return
    # torch's handler looks at the sender as well, but dies of a foreign signal; blocked, it never runs
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})
    threading.Thread(target=_exit_on_sigterm_of_parent, args=(os.getppid(),), daemon=True).start()
    creator = multiprocessing.parent_process()
    if creator is not None and creator.pid != os.getppid():
        # the fork server, whose death torch watches for, lives as long as its children
        threading.Thread(target=_exit_behind, args=(creator,), daemon=True).start()


def _exit_behind(creator: BaseProcess) -> None:
    creator.join()
    os._exit(0)


def _exit_on_sigterm_of_parent(born_to: int) -> None:
    creator = multiprocessing.parent_process()  # another process than `born_to` under forkserver
    while True:
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
        is_orphan = os.getppid() != born_to
        if is_orphan or (creator is not None and sender == creator.pid):
            os._exit(0)
