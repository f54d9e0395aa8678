"""A row of numbers from every process to all others, through memory, where all of them are on one machine."""

import contextlib
import itertools
import mmap
import os
import time
import weakref
import zlib
from pathlib import Path
from tempfile import mkstemp

import numpy as np
import torch.distributed as dist

from trainkit.utils import comm

FOLDER = Path("/dev/shm")  # of memory that processes of one machine share, in any case not of several machines

_LOOKS_AT_ONCE = 50  # at a row that is about to come, before the processor is left to others


class SharedRows:
    """What `torch.distributed.all_gather` does, for few numbers and in a tenth of the time.

    A process is nowhere more than one exchange ahead of another, which it would wait for, so two rows for each of them
    are enough: the one being read is not written. A row counts once its number is there and its checksum fits, for
    processors that show writes in another order. A process that takes part holds a lock, which ends with it.
    """

    def __init__(self, path: str, rank: int, world_size: int) -> None:
        """For `among_all`, which makes the file.

        Raises:
            OSError: there is no such file here.
        """
        self._file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._file)
        self._lock(rank, os.F_TLOCK)
        numbers = np.frombuffer(mmap.mmap(self._file, 0), np.float64)
        self._shared = numbers.reshape(2, world_size, -1)  # a row begins with its number and its checksum
        self._rank = rank
        self._count = 0
        self._is_exchanging = False  # or was when it failed

    @classmethod
    def among_all(cls, width: int) -> "SharedRows | None":
        """Rows of ``width`` numbers for all ranks, which all have to call it; None if they share no memory."""
        rank, world_size = comm.get_rank(), comm.get_world_size()
        path = comm.broadcast(_make_file(2 * world_size * (2 + width)) if rank == 0 else None)
        rows = None
        try:
            if path is not None:
                with contextlib.suppress(OSError):
                    rows = cls(path, rank, world_size)
            everywhere = all(comm.all_gather(rows is not None))
        finally:
            if path is not None and rank == 0:
                os.unlink(path)  # it is there as long as somebody has it open
        return rows if everywhere else None

    def all_gather(self, row: np.ndarray) -> np.ndarray:
        """The rows of all ranks, which all have to call it.

        Args:
            row: float64, shape ``[width]``.

        Returns:
            Shape ``[world size, width]``.

        Raises:
            RuntimeError: a process has ended, or has not come within torch's timeout for process groups; an exchange
                of this one has failed before, since when the ranks may stand in different ones.
        """
        if self._is_exchanging:
            raise RuntimeError(
                f"rank {self._rank} cannot exchange metrics: another exchange has failed, or is under way in another "
                "thread (write_metrics beside asynchronous metrics); make a new process group, or use one thread"
            )
        self._is_exchanging = True
        try:
            rows = self._exchange(row)
        except BaseException:
            self._lock(self._rank, os.F_ULOCK)  # the others need not wait any more
            raise
        self._is_exchanging = False
        return rows

    def _exchange(self, row: np.ndarray) -> np.ndarray:
        self._count += 1
        shared = self._shared[self._count % 2]
        mine = shared[self._rank]
        mine[2:] = row
        mine[1] = zlib.crc32(mine[2:].data, self._count)
        mine[0] = self._count
        rows = np.empty_like(shared)
        for rank in range(len(rows)):
            self._read(rank, shared[rank], rows[rank])
        return rows[:, 2:]

    def _read(self, rank: int, shared: np.ndarray, row: np.ndarray) -> None:
        begin = time.monotonic()
        for look in itertools.count(1):
            has_ended = look % 100 == 0 and self._has_ended(rank)  # asked before the last look at what it has left
            row[:] = shared
            if row[0] == self._count and row[1] == zlib.crc32(row[2:].data, self._count):
                return
            if has_ended:
                raise RuntimeError(
                    f"rank {rank} has ended, or failed, while rank {self._rank} waits for its metrics; see its log"
                )
            waited = time.monotonic() - begin
            if waited > dist.default_pg_timeout.total_seconds():
                raise RuntimeError(
                    f"rank {self._rank} has waited {waited:.0f} s for the metrics of rank {rank}; all ranks must "
                    "exchange them in the same iterations (py-spy dump shows where a process is)"
                )
            # also for no time at all, which lets other threads go on
            time.sleep(0.0 if look < _LOOKS_AT_ONCE else min(1e-3, 5e-5 * (look - _LOOKS_AT_ONCE)))

    def _has_ended(self, rank: int) -> bool:
        try:
            self._lock(rank, os.F_TEST)
        except OSError:  # it has its lock
            return False
        return True

    def _lock(self, rank: int, command: int) -> None:
        os.lseek(self._file, rank, os.SEEK_SET)
        os.lockf(self._file, command, 1)


def _make_file(numbers: int) -> str | None:
    try:
        file, path = mkstemp(prefix="trainkit_", dir=FOLDER)
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, 8 * numbers)  # else a full memory would say so later, by a signal
    except OSError:
        os.unlink(path)
        return None
    finally:
        os.close(file)  # before it is opened for the rows: closing it would give up their lock
    return path
