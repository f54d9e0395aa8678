"""A rank that fails ends the others, which may wait for it."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

GRACE_SEC = 10.0  # for the others to end by themselves

_FIRST = "trainkit/first_failure"
_SPEAKER = "trainkit/first_to_say_it"
_FOREVER = timedelta(days=20)  # a longer one overflows in torch

_entered: tuple[dist.Store, int] | None = None  # of `failing_together`: the store, the rank


def says_it_for_all() -> bool:
    """Whether this rank, which has failed, is the first to ask: what several would say is said by that one.

    True outside of `failing_together`.
    """
    if _entered is None:
        return True
    with contextlib.suppress(dist.DistError):  # the store may be lost with rank 0
        return _is_first(_SPEAKER, *_entered)
    return True


def _is_first(key: str, store: dist.Store, rank: int) -> bool:
    return int(store.compare_set(key, "", str(rank))) == rank


@contextlib.contextmanager
def failing_together(store: dist.Store, rank: int, world_size: int) -> Iterator[None]:
    """If the code inside fails on one rank, those that have not ended ``GRACE_SEC`` later are killed.

    Every rank enters it. Without that a rank on a GPU waits for the lost one until the timeout of the group, and one
    that takes SIGTERM for a request to stop until its launcher kills it. torchrun gets to know the failure, and of
    several, which was the first.

    Args:
        store: of all ranks.
    """
    global _entered
    heard, another_failed = threading.Event(), threading.Event()
    waiting = store.clone()  # type: ignore[attr-defined]  # a store serves one thread at a time
    arguments = waiting, rank, heard, another_failed
    threading.Thread(target=_end_with_others, args=arguments, name="failures", daemon=True).start()
    _entered = store, rank
    try:
        yield
    except BaseException as error:
        if not another_failed.is_set():  # else all know, and the store may be lost, of which torch writes a page
            _fail(store, rank, world_size)
        _tell_torchrun(error)
        raise
    else:
        _leave(store, rank, world_size, heard)
    finally:
        _entered = None
        heard.wait(GRACE_SEC)  # a thread that is in the store when the interpreter ends aborts the process


def _leave(store: dist.Store, rank: int, world_size: int, heard: threading.Event) -> None:
    if not heard.is_set():
        for other in range(world_size) if rank == 0 else [rank]:  # with rank 0 goes the store
            with contextlib.suppress(dist.DistError):
                store.set(_news_for(other), "end")


def _fail(store: dist.Store, rank: int, world_size: int) -> None:
    with contextlib.suppress(dist.DistError):  # as above
        for other in range(world_size) if _is_first(_FIRST, store, rank) else []:
            store.set(_news_for(other), "failure")
        store.get(_FIRST)  # behind it, the store has passed on all of them


def _tell_torchrun(error: BaseException | None) -> None:
    if isinstance(error, SystemExit):  # of one that was told in a line, see `user_errors_exit`
        error = error.__cause__ or error.__context__
    if isinstance(error, Exception) and "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(error)
        time.sleep(1.1)  # torchrun tells the first failure by the second: no other rank fails of this one within it


def _end_with_others(store: dist.Store, rank: int, heard: threading.Event, another_failed: threading.Event) -> None:
    news = b""
    with contextlib.suppress(dist.DistError):  # rank 0 was killed; whoever launched it ends the others
        store.set_timeout(_FOREVER)
        news = store.get(_news_for(rank))
    if news == b"failure":
        another_failed.set()  # or this rank, for which it makes no difference any more
    heard.set()
    if news == b"failure":
        time.sleep(GRACE_SEC)
        os.kill(os.getpid(), signal.SIGKILL)


def _news_for(rank: int) -> str:
    return f"trainkit/news_for_{rank}"
