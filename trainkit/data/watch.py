"""Watch loader workers, to report what they do if no batch comes."""

import logging
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import Array, c_int64
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from typing import Any, TypeAlias

from torch.utils.data import get_worker_info

from trainkit.utils import waiting

logger = logging.getLogger(__name__)

WARN_SEC = 60.0
ENDING_SEC = 1.0  # connections of a process are closed before it has ended
_CUT_OFF = ConnectionError, EOFError  # raised, too, if a worker ends while it sends a batch
Owed: TypeAlias = dict[int, Sequence[Any]]  # position after a requested batch -> its indices


class WorkerNotes:
    """The current work of each worker: its pid, the position after the batch, and the number of loaded samples."""

    def __init__(self, num_workers: int) -> None:
        self._rows: Array[c_int64] = RawArray("q", 3 * num_workers)  # without a lock

    def begin(self, position: int) -> int | None:
        """Note a new batch; return the worker's place for `count`, or None outside of a worker."""
        worker = get_worker_info()
        if worker is None:
            return None
        self._rows[3 * worker.id : 3 * worker.id + 3] = [os.getpid(), position, 0]
        return 3 * worker.id + 2

    def count(self, place: int, num_samples: int) -> None:
        self._rows[place] = num_samples

    def read(self) -> list[tuple[int, int, int]]:
        rows = iter(self._rows)
        return [*zip(rows, rows, rows, strict=True)]


class Watch:
    """Waits for batches of workers, and reports what the workers do if nothing comes.

    Args:
        timeout: in seconds; 0: no limit.
        name: indices -> names of samples.
    """

    def __init__(self, notes: WorkerNotes | None, timeout: float, name: Callable[[Sequence[Any]], str]) -> None:
        self._notes, self._timeout, self._name = notes, timeout, name
        self._processes: list[BaseProcess] = []

    def iterate(self, loader: Any) -> Iterator[Any]:
        """``iter(loader)``, and watch its workers from now on."""
        before = multiprocessing.active_children()
        batches = iter(loader)
        self._processes = [p for p in multiprocessing.active_children() if p not in before] or self._processes
        return batches

    def next(self, batches: Iterator[Any], owed: Owed) -> Any:
        """The next of ``batches``.

        Raises:
            RuntimeError: a worker has ended, or nothing came in time.
            trainkit.utils.waiting.Abandoned: a stop was requested.
        """
        start, has_warned = time.monotonic(), False
        while True:
            try:
                return next(batches)
            except StopIteration as error:
                waiting.refuse_end_by_sample(error)
                raise
            except (RuntimeError, *_CUT_OFF) as error:
                self.explain(error, owed)
                if not is_timeout(error):
                    raise
            waiting.waiter.get().look_up()
            waited = time.monotonic() - start
            if self._timeout and waited >= self._timeout:
                facts = self.describe(owed)
                self.end_workers()
                raise RuntimeError(
                    f"no batch for {waited:.0f} s (DATALOADER.TIMEOUT, timeout of a loader): {facts}. "
                    "Correct the code that reads the sample, or set a longer timeout (0: none)"
                )
            if waited >= WARN_SEC and not has_warned:
                has_warned = True
                logger.warning("No batch for %.0f s: %s", waited, self.describe(owed))

    def end_workers(self) -> None:
        """End all workers now: torch would wait 5 s for each one that hangs, and delay the save of a stopped run."""
        for process in self._processes:
            process.terminate()

    def explain(self, error: Exception, owed: Owed) -> None:
        """
        Raises:
            RuntimeError: ``error`` says that a worker has ended, and it was one of these; the new error says what it
                did.
        """
        if (is_of_lost_worker(error) or isinstance(error, _CUT_OFF)) and self._has_lost_one():
            raise RuntimeError(
                f"a loader worker has ended: {self.describe(owed)}. Check whether the code that reads the sample ends "
                "the process, crashes in a library, or uses so much memory that the system kills it; set "
                "DATALOADER.NUM_WORKERS (num_workers of a loader) to 0 to see more"
            ) from error

    def _has_lost_one(self) -> bool:
        sentinels = [process.sentinel for process in self._processes]
        ended = multiprocessing.connection.wait(sentinels, ENDING_SEC) if sentinels else []
        for process in self._processes:
            if process.sentinel in ended:
                process.join(ENDING_SEC)  # now it has an exit code
        return bool(ended)

    def describe(self, owed: Owed) -> str:
        """The workers that have ended; if none has, the worker with the next batch."""
        by_pid = {process.pid: process for process in self._processes}
        ended = {process.pid for process in self._processes if not process.is_alive()}
        rows = [] if self._notes is None else [row for row in enumerate(self._notes.read()) if row[1][0] in by_pid]
        next_owed = min(owed, default=None)
        said = [row for row in rows if row[1][0] in ended] or [row for row in rows if row[1][1] == next_owed]
        if said:
            return "; ".join(self._describe_worker(n, by_pid[row[0]], row, owed) for n, row in said)
        # for a stream, or if all workers are idle
        parts = [f"worker {_state(process)}" for pid, process in by_pid.items() if pid in ended or not ended]
        if next_owed is not None:
            parts.append(f"no worker has started the next batch, of {self._name(owed[next_owed])}")
        return "; ".join(parts)

    def _describe_worker(self, number: int, process: BaseProcess, row: tuple[int, int, int], owed: Owed) -> str:
        text = f"worker {number} {_state(process)}"
        indices = owed.get(row[1])
        if indices is None:
            return f"{text} had nothing to do"
        now = f"was at {self._name(indices[row[2] : row[2] + 1])}" if row[2] < len(indices) else "had all samples"
        return f"{text} {now}, for the batch of {self._name(indices)}"


def is_timeout(error: Exception) -> bool:
    return str(error).startswith("DataLoader timed out")


def is_of_lost_worker(error: Exception) -> bool:
    return str(error).startswith("DataLoader worker (pid")


def _state(process: BaseProcess) -> str:
    state = "alive" if process.is_alive() else f"ended with exit code {process.exitcode}"
    return f"(pid {process.pid}, {state})"
