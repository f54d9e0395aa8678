"""The iterator of a loader; if no batch comes, it reports what the workers are doing."""

import logging
import multiprocessing.connection
import time
import weakref
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from trainkit.data.common import name_samples
from trainkit.data.tasks import Tasks
from trainkit.utils import waiting

logger = logging.getLogger(__name__)

WARN_SEC = 60.0
ENDING_SEC = 1.0  # wait: the connections of a process are closed before it has ended
TIMEOUT, LOST = "DataLoader timed out", "DataLoader worker (pid"  # how torch's errors start
_CUT_OFF = ConnectionError, EOFError, FileNotFoundError  # errors if a worker ends while it sends a batch


class Deliveries(Iterator[Any]):
    """The batches of a loader.

    Args:
        fetched: torch's iterator. It gives pairs (position after the batch, batch); only batches if ``tasks`` has no
            notes.
        dataset: names the samples.
        timeout: in seconds; 0: no limit.
    """

    def __init__(self, fetched: Iterator[Any], dataset: Any, tasks: Tasks, timeout: float) -> None:
        self._fetched, self._dataset, self._tasks, self._timeout = fetched, dataset, tasks, timeout
        self._workers: list[BaseProcess] = getattr(fetched, "_workers", [])  # by number
        # If Python collects a cycle of objects, such as a trainer and its hooks, it would close the workers' queues
        # before torch can tell the workers to end, and torch waits 5 s for each worker. Held here, the queues
        # are in no cycle.
        queues = [getattr(fetched, name, None) for name in ("_index_queues", "_worker_result_queue")]
        weakref.finalize(self, id, queues).atexit = False

    def __next__(self) -> Any:
        """
        Raises:
            RuntimeError: a worker has ended, or no batch came in time.
        """
        fetched = self._wait()
        if not self._tasks.notes:
            return fetched
        # the position comes with the batch, so that it is correct after a failed fetch too
        position, batch = fetched
        self._tasks.delivered(position)
        return batch

    def _wait(self) -> Any:
        start, has_warned = time.monotonic(), False
        while True:
            try:
                return next(self._fetched)
            except StopIteration as error:
                waiting.refuse_end_by_sample(error)
                raise
            except (RuntimeError, *_CUT_OFF) as error:
                self.explain(error)
                if not str(error).startswith(TIMEOUT):
                    raise
            waited = time.monotonic() - start
            if self._timeout and waited >= self._timeout:
                facts = self._describe()
                self._end_workers()
                raise RuntimeError(
                    f"no batch for {waited:.0f} s (DATALOADER.TIMEOUT, timeout of a loader): {facts}. "
                    "Correct the code that reads the sample, or set a longer timeout (0: none)"
                )
            if waited >= WARN_SEC and not has_warned:
                has_warned = True
                logger.warning("No batch for %.0f s: %s", waited, self._describe())

    def _end_workers(self) -> None:
        """End all workers now: torch would wait 5 s for each worker that hangs, and delay the save of a stopped run."""
        for worker in self._workers:
            worker.terminate()

    def explain(self, error: Exception) -> None:
        """
        Raises:
            RuntimeError: ``error`` says that one of these workers has ended; the new error says what the worker did.
        """
        of_dataset = str(error).startswith("Caught ")  # torch's start of what a worker's code has raised
        if not self._workers or of_dataset or not (str(error).startswith(LOST) or isinstance(error, _CUT_OFF)):
            return
        ended = multiprocessing.connection.wait([worker.sentinel for worker in self._workers], ENDING_SEC)
        for worker in self._workers:
            if worker.sentinel in ended:
                worker.join(ENDING_SEC)  # now the worker has an exit code
        if ended:
            raise RuntimeError(
                f"a loader worker has ended: {self._describe()}. Check whether the code that reads the sample ends "
                "the process, crashes in a library, or uses so much memory that the system kills it; set "
                "DATALOADER.NUM_WORKERS (num_workers of a loader) to 0 to see more"
            ) from error

    def _describe(self) -> str:
        """The workers that have ended; if none has, the worker with the next batch, or all workers."""
        numbers, owed = range(len(self._workers)), self._tasks.owed
        ended = [number for number in numbers if not self._workers[number].is_alive()]
        following = min(owed, default=None)
        suspects = ended or [n for n in numbers if self._tasks.notes and self._tasks.notes[2 * n] == following]
        parts = [self._describe_worker(number) for number in suspects or numbers]
        if following is not None and not suspects:
            names = name_samples(self._dataset, owed[following].indices)
            parts.append(f"no worker has started the next batch, of {names}")
        return "; ".join(parts)

    def _describe_worker(self, number: int) -> str:
        worker = self._workers[number]
        state = "alive" if worker.is_alive() else f"ended with exit code {worker.exitcode}"
        state = f"(pid {worker.pid}, {state})"
        if not self._tasks.notes:
            return f"worker {state}"
        position, count = self._tasks.notes[2 * number : 2 * number + 2]
        if position not in self._tasks.owed:
            return f"worker {number} {state} had nothing to do"
        indices = self._tasks.owed[position].indices
        now = f"was at {name_samples(self._dataset, indices[count : count + 1])}"
        now = now if count < len(indices) else "had all samples"
        return f"worker {number} {state} {now}, for the batch of {name_samples(self._dataset, indices)}"
