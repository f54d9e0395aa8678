"""Assertions that train a job several times and compare its runs, bit by bit."""

import shutil
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainkit.engine.loop import TrainerBase
from trainkit.testing.compare import Difference, likely_cause
from trainkit.testing.processes import Failed, call_in_new_process, check_importable
from trainkit.testing.record import Keeper, Record, record_run
from trainkit.utils import comm


def assert_resumes_exactly(
    make_trainer: Callable[[Path], TrainerBase],
    folder: str | Path,
    kills: int | None = 3,
    *,
    max_iter: int | None = None,
    seed: int = 0,
    ignore: Collection[str] = (),
    new_processes: bool = True,
) -> None:
    """Kill a job at some moments, resume it, and compare it with a run that was not killed.

    The job is trained once as a whole. Its folder is kept as it is at some calls of hook points,
    which is what a kill at this moment would leave. From each copy a new process resumes, with
    another random state. Compared are the calls of hook points from there on, the batches, losses
    and random numbers, metrics.json and everything in the checkpoints.

    Args:
        make_trainer: called with a folder; returns a trainer that writes there, and that has loaded
            the newest checkpoint in it, if there is one. It must be a function of a module, since
            new processes import it.
        folder: for the runs; it must be empty.
        kills: the number of moments, drawn by ``seed``; None: each call of a hook point.
        max_iter: the length of the run, for a trainer without a config.
        ignore: names of metrics that differ between equal runs; clock readings of trainkit do not
            count anyway.
        new_processes: False: train in this process, which is quicker, but does not find a state of
            a module. Any function will do. With several ranks, each of them calls this.

    Raises:
        AssertionError: a resumed run differs; the message has the first difference and what the
            cause may be.
        ValueError: ``make_trainer`` cannot be imported; the folder is not empty; the run writes no
            checkpoint before its last iteration.
        RuntimeError: the run that is not killed fails in its new process.
    """
    if new_processes:
        check_importable(make_trainer)
    folder = Path(folder)
    _check_empty(folder)
    train = partial(_train, make_trainer, new_processes=new_processes, max_iter=max_iter)
    whole_folder = folder / "whole"
    kept = folder / "kept"
    keeper = Keeper(whole_folder, kept, kills, seed)
    whole = train(whole_folder, seed=1, keeper=keeper)
    if not any(comm.all_gather(whole.saves_early)):
        raise ValueError(
            "the run writes no checkpoint before its last iteration, so there is nothing to resume "
            "from; save earlier, as with SOLVER.CHECKPOINT_PERIOD"
        )
    events = sorted(int(path.name) for path in kept.glob("*"))
    for event in events:
        where = f"killed at event {event} of {len(whole.calls)}: {whole.calls[event]}"
        resumed_folder = folder / f"resumed_{event}"
        if comm.is_main_process():
            shutil.copytree(kept / str(event), resumed_folder)
        comm.synchronize()
        try:
            resumed = train(resumed_folder, seed=2 + event)
        except Failed as error:
            raise AssertionError(f"{where}\nthe resumed run fails:\n{error}") from None
        if resumed.before is None:
            raise AssertionError(
                f"{where}\nthe resumed run starts anew: nothing has loaded the newest checkpoint "
                "of the folder, as trainer.resume_or_load() does"
            )
        difference = Difference(whole, resumed, (whole_folder, resumed_folder), ignore)
        text = ""
        if difference.found:
            cause = likely_cause(difference, whole, resumed)
            order = "of each two values the second one is that of the resumed run"
            text = "\n".join([where, *difference.found, order, f"likely cause: {cause}"])
        _raise_on_all_ranks(text)


def assert_same_on_any_workers(
    make_trainer: Callable[[Path, int], TrainerBase],
    folder: str | Path,
    workers: Sequence[int] = (0, 1, 2),
    *,
    max_iter: int | None = None,
    ignore: Collection[str] = (),
    new_processes: bool = True,
) -> None:
    """Train a job with several numbers of loader workers, and compare the runs, bit by bit.

    Args:
        make_trainer: called with a folder and the number of workers; else as in
            `assert_resumes_exactly`, as are the other arguments.
        workers: at least two numbers.

    Raises:
        AssertionError: a run differs from the first one.
        ValueError: as in `assert_resumes_exactly`; there are less than two numbers.
    """
    if len(workers) < 2:
        raise ValueError(f"workers must have at least two numbers, got {list(workers)}")
    if new_processes:
        check_importable(make_trainer)
    folder = Path(folder)
    _check_empty(folder)
    records = []
    folders = []
    for number in workers:
        folders.append(folder / f"workers_{number}")
        make = partial(_with_workers, make_trainer, number)
        records.append(_train(make, folders[-1], new_processes, max_iter=max_iter, seed=1))
        difference = Difference(records[0], records[-1], (folders[0], folders[-1]), ignore)
        text = ""
        if difference.found:
            cause = (
                "a random generator of the dataset's own, of which each worker has a copy; or an "
                "iterable dataset that does not divide its samples among the workers"
            )
            where = f"with {workers[0]} and with {number} workers the runs differ"
            text = "\n".join([where, *difference.found, f"likely cause: {cause}"])
        _raise_on_all_ranks(text)


def _with_workers(
    make_trainer: Callable[[Path, int], TrainerBase], number: int, folder: Path
) -> TrainerBase:
    return make_trainer(folder, number)


def _train(
    make_trainer: Callable[[Path], TrainerBase], folder: Path, new_processes: bool, **options: Any
) -> Record:
    if not new_processes:
        return record_run(make_trainer, folder, **options)
    record: Record = call_in_new_process(record_run, make_trainer, folder, **options)
    return record


def _raise_on_all_ranks(text: str) -> None:
    """Raise AssertionError if one rank has a text, so that no other rank goes on alone."""
    for text_of_rank in comm.all_gather(text):
        if text_of_rank:
            raise AssertionError(text_of_rank)


def _check_empty(folder: Path) -> None:
    comm.synchronize()
    is_empty = not folder.exists() or next(folder.iterdir(), None) is None
    comm.synchronize()
    if not is_empty:
        raise ValueError(f"folder must be empty, '{folder}' is not")
