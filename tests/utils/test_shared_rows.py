"""Rows of numbers through memory, between processes that are forked here; `test_metrics.py` has those of a group."""

import multiprocessing
import os
import random
import resource
import signal
import time
import zlib
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from trainkit.utils import shared_rows
from trainkit.utils.shared_rows import SharedRows

WIDTH = 5
forked = multiprocessing.get_context("fork")


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Of a file for three ranks."""
    monkeypatch.setattr(shared_rows, "FOLDER", tmp_path)
    return shared_rows._make_file(2 * 3 * (2 + WIDTH))


@pytest.fixture
def start():
    """Begins a process; in the end none is left."""
    processes = []

    def begin(function, *arguments):
        process = forked.Process(target=function, args=arguments)
        process.start()
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.join()


def row(rank, count):
    return np.arange(WIDTH) * 100.0 * count + rank


def exchange(path, rank, times, opened):
    """So many exchanges, each at a moment of its own."""
    chance = random.Random(rank)
    rows = SharedRows(path, rank, 3)
    opened.wait()
    for count in range(times):
        if chance.random() < 0.05:
            time.sleep(chance.random() / 200)
        gathered = rows.all_gather(row(rank, count))
        assert np.array_equal(gathered, [row(other, count) for other in range(3)])


def test_each_process_gets_the_rows_of_all_in_each_exchange(path, start):
    opened = forked.Barrier(3)
    processes = [start(exchange, path, rank, 1000, opened) for rank in range(3)]

    for process in processes:
        process.join(timeout=20)
    assert [process.exitcode for process in processes] == [0, 0, 0]


def pair(path):
    """Rows of rank 0, and those of rank 1 as they lie in its memory; none has rank 2's lock, whose rows are written."""
    rows = SharedRows(path, 0, 3)
    for count in (1, 2):
        write(rows, 2, count)
    return rows


def write(rows, rank, count, *, checksum_of=None):
    slot = rows._shared[count % 2][rank]
    slot[2:] = row(rank, count)
    slot[1] = zlib.crc32(slot[2:].tobytes(), count if checksum_of is None else checksum_of)
    slot[0] = count


def join(path, opened, and_then):
    rows = SharedRows(path, 1, 3)
    opened.wait()
    and_then(rows)


def test_a_process_that_was_killed_is_named(path, start):
    rows, opened = pair(path), forked.Barrier(2)
    start(join, path, opened, lambda theirs: os.kill(os.getpid(), signal.SIGKILL))
    opened.wait()

    with pytest.raises(RuntimeError, match="rank 1 has ended, or failed, while rank 0 waits for its metrics"):
        rows.all_gather(row(0, 1))


def test_the_row_that_a_process_left_when_it_ended_counts(path, monkeypatch):
    rows = pair(path)

    def write_and_end(rows, rank):
        write(rows, rank, 1)
        return True

    monkeypatch.setattr(SharedRows, "_has_ended", write_and_end)
    assert np.array_equal(rows.all_gather(row(0, 1)), [row(rank, 1) for rank in range(3)])


def test_a_process_is_waited_for_while_it_is_there_but_not_for_ever(path, start, monkeypatch):
    rows, opened, ending = pair(path), forked.Barrier(2), forked.Event()
    start(join, path, opened, lambda theirs: ending.wait())
    opened.wait()
    monkeypatch.setattr(dist, "default_pg_timeout", timedelta(seconds=0.5))

    with pytest.raises(RuntimeError, match="rank 0 has waited 1 s for the metrics of rank 1"):
        rows.all_gather(row(0, 1))
    ending.set()


def give_up(theirs, given_up, ending):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "default_pg_timeout", timedelta(0))
        with pytest.raises(RuntimeError, match="rank 1 has waited"):
            theirs.all_gather(row(1, 1))
    with pytest.raises(RuntimeError, match="rank 1 cannot exchange metrics: another exchange has failed"):
        theirs.all_gather(row(1, 2))
    given_up.set()
    ending.wait()


def test_behind_an_exchange_that_failed_there_is_none_and_nobody_waits_for_it(path, start):
    """Its row of the exchange that failed would be taken for that of a later one."""
    opened, given_up, ending = forked.Barrier(2), forked.Event(), forked.Event()
    start(join, path, opened, lambda theirs: give_up(theirs, given_up, ending))
    opened.wait()
    assert given_up.wait(timeout=20)
    rows = pair(path)

    rows.all_gather(row(0, 1))
    with pytest.raises(RuntimeError, match="rank 1 has ended, or failed"):
        rows.all_gather(row(0, 2))
    ending.set()


@pytest.mark.parametrize("checksum_of", [0, 3])
def test_a_row_does_not_count_before_its_checksum(path, checksum_of):
    rows = pair(path)
    write(rows, 1, 1, checksum_of=checksum_of)
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        rows.all_gather(row(0, 1))


def test_there_is_no_file_where_the_folder_is_missing_or_full(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_rows, "FOLDER", tmp_path / "missing")
    assert shared_rows._make_file(1) is None

    monkeypatch.setattr(shared_rows, "FOLDER", tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        assert shared_rows._make_file(1000) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.iterdir()] == []
