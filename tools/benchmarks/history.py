"""The cost of histories: the time of a step after millions of others, and their memory."""

import multiprocessing
import os
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks import job
from benchmarks.measure import Row, Runner, alternate, compare
from trainkit.engine import HookBase, TrainerBase
from trainkit.utils.events import EventStorage

_OLD_STEPS, _YOUNG_STEPS = 2_000_000, 1_000


class Past(HookBase):
    """Fills the new storage of a run that starts at a later iteration, as if the run had done the earlier steps.

    Args:
        most: fill at most this number of steps, the last ones.
    """

    def __init__(self, most: int = _OLD_STEPS) -> None:
        self._most = most

    def before_train(self) -> None:
        storage = self.trainer.storage
        if storage.histories():  # the run continues
            return
        smoothed = dict.fromkeys(
            ("total_loss", "loss_mse", "loss_l1", "data_time", "rank_data_time", "time"), 1e-4
        )
        as_they_are = {"lr": job.LR}
        for iter in range(max(0, self.trainer.start_iter - self._most), self.trainer.start_iter):
            storage.put_scalars(cur_iter=iter, **smoothed)
            storage.put_scalars(smoothing_hint=False, cur_iter=iter, **as_they_are)
            if iter % job.LOG_PERIOD == job.LOG_PERIOD - 1:
                storage.put_scalar("eta_seconds", 1.0, smoothing_hint=False, cur_iter=iter)


def history(
    rounds: int = 150,
    *,
    scratch: Path,
    steps: int = 200,
    old_steps: int = _OLD_STEPS,
    pairs: int = 4,
) -> list[Row]:
    """Each trainer of the step rows with ``old_steps`` steps in its storage, compared with a trainer with 1,000 steps.

    The old trainer continues from round to round; the young trainer is new in each round. Because of its place in
    memory, a trainer can always be a percent faster than an equal trainer. So there are several old trainers.
    """
    old_name, young_name = f"after {old_steps:,} steps", f"after {_YOUNG_STEPS:,} steps"
    rows = []
    with job.one_thread(), job.logging_to(scratch):
        for name, make in job.TRAINERS.items():
            found: dict[str, list[float]] = {old_name: [], young_name: []}
            for _ in range(pairs):
                runners: dict[str, Runner] = {
                    old_name: _old(_new(make, scratch), steps, old_steps),
                    young_name: partial(_train_young, make, scratch, steps),
                }
                for age, values in alternate(runners, -(-rounds // pairs)).items():
                    found[age] += values
            rows.append(compare(f"long history: {name}", found, old_name, young_name, 1.02))
    return rows


def _new(make: Callable[..., TrainerBase], scratch: Path) -> job.Chunks:
    return job.Chunks(make(Path(tempfile.mkdtemp(dir=scratch)), more_hooks=[Past()]))


def _old(chunks: job.Chunks, steps: int, old_steps: int) -> Runner:
    return lambda: chunks(steps, start_iter=max(chunks.trainer.iter, old_steps))


def _train_young(make: Callable[..., TrainerBase], scratch: Path, steps: int) -> float:
    return _new(make, scratch)(steps, start_iter=_YOUNG_STEPS)


def memory(rounds: int = 1, *, scratch: Path, steps: int = 10_000_000) -> list[Row]:
    """The memory that a storage adds to a new process if 20 scalars are put per step."""
    few = min(steps, 100_000)
    growths, traces = [], []
    for _ in range(rounds):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            # first: a used process has free memory
            growths.append(pool.apply(_growth_mib, (steps,)))
            traces.append(pool.apply(_traced_mib, (few,)))
    note = f"of the process, at its peak; of Python's allocations in {few:,} steps {max(traces):.1f} MiB"
    return [Row(f"storage of 20 scalars, {steps:,} steps", max(growths), 64, "MiB", note=note)]


def _growth_mib(steps: int) -> float:
    before = _resident_mib()
    return max(_resident_mib() for _ in _put(steps)) - before


def _traced_mib(steps: int) -> float:
    tracemalloc.start()
    for _ in _put(steps):
        pass
    return tracemalloc.get_traced_memory()[1] / 2**20


def _put(steps: int) -> Iterator[None]:
    """Fill a storage that nobody reads; yields every 1,000 steps, and at the end."""
    storage = EventStorage()
    names = [f"scalar_{i}" for i in range(20)]
    for iter in range(steps):
        storage.iter = iter
        for name in names:
            storage.put_scalar(name, float(iter))
        if iter % 1000 == 999:
            yield
    storage.flush()
    yield


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
