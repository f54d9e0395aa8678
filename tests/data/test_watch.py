"""What is said about workers whose batches do not come."""

import logging
import multiprocessing
import os
import threading

import pytest
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from trainkit.data import InferenceSampler, ResumableLoader, TrainingSampler
from trainkit.data import watch as watch_module
from trainkit.utils import waiting

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Bad(Dataset):
    """One sample is never read."""

    def __init__(self, read, bad=5):
        self.read, self.bad = read, bad

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == self.bad:
            self.read()
        return index


class BadStream(IterableDataset):
    def __iter__(self):
        yield from range(2)
        hang()


def hang():
    threading.Event().wait()


def exit_at_once():
    os._exit(0)  # with another code torch raises in whatever the process of the loader does


class Clock:
    """Goes on by ``step`` seconds at each reading."""

    now = step = 0

    def monotonic(self):
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(watch_module, "time", clock)
    monkeypatch.setattr(waiting, "POLL_SEC", 0.05)
    others.update(process.pid for process in multiprocessing.active_children())
    return clock


others = set()  # workers of other tests, which are still ending


def make(dataset, **options):
    options = {"sampler": TrainingSampler(8, shuffle=False), "num_workers": 2, "collate_fn": list, **options}
    return ResumableLoader(dataset, batch_size=2, **options)


def fail(batches):
    with pytest.raises(RuntimeError) as caught:
        next(batches)
    for error in (caught.value, caught.value.__cause__):
        if error is not None:
            error.__traceback__ = None  # it holds the workers
    return str(caught.value)


def pids():
    """Of the workers of this test."""
    return sorted(process.pid for process in multiprocessing.active_children() if process.pid not in others)


def test_a_batch_that_does_not_come_is_warned_about_once_and_then_an_error_that_names_worker_and_samples(clock, caplog):
    batches = iter(make(Bad(hang)))
    assert [next(batches), next(batches)] == [[0, 1], [2, 3]]
    clock.step = 20
    pid = pids()[0]
    message = fail(batches)

    facts = f"worker 0 (pid {pid}, alive) was at sample 5 of Bad"
    facts += ", for the batch of sample 4 of Bad, sample 5 of Bad"
    assert facts in message
    assert message.startswith("no batch for 600 s (DATALOADER.TIMEOUT, timeout of a loader): ")
    assert [record.getMessage() for record in caplog.records] == [f"No batch for 60 s: {facts}"]
    assert caplog.records[0].levelno == logging.WARNING


def test_a_stream_names_its_workers(clock):
    batches = iter(make(BadStream(), sampler=None, num_workers=1, timeout=100))
    assert next(batches) == [0, 1]
    clock.step = 20
    pid = pids()[0]
    assert f": worker (pid {pid}, alive). Correct" in fail(batches)


@pytest.mark.parametrize("sampler", [TrainingSampler(8, shuffle=False), InferenceSampler(8)])
def test_a_worker_that_ends_inside_the_dataset_is_one_error_that_names_it_and_its_samples(clock, sampler):
    message = fail(iter(make(Bad(exit_at_once, bad=1), sampler=sampler, num_workers=1)))
    assert message.startswith("a loader worker has ended: worker 0 (pid ")
    assert ", ended with exit code 0) was at sample 1 of Bad, for the batch of sample 0 of Bad, sample 1" in message


@pytest.mark.parametrize(
    "error", [ConnectionResetError(104, "Connection reset by peer"), FileNotFoundError(2, "No file")]
)
def test_a_worker_that_ends_while_it_hands_over_a_batch_is_named(clock, error):
    class Lost:
        """As torch, if the process is still there when it looks why it has no connection to it."""

        def __next__(self):
            for process in multiprocessing.active_children():
                process.terminate()
            raise error

    batches = iter(make(Bad(print), num_workers=1))
    batches._fetched, torchs = Lost(), batches._fetched
    pid = pids()[0]
    assert f"a loader worker has ended: worker 0 (pid {pid}, ended with exit code 0) " in fail(batches)
    del torchs


def test_a_connection_that_a_dataset_loses_is_its_own_error(clock):
    def lose():
        raise ConnectionResetError(104, "Connection reset by peer")

    with pytest.raises(ConnectionResetError, match="Connection reset by peer"):
        next(iter(make(Bad(lose, bad=1))))


class Truncated(IterableDataset):
    """The first worker is done early, the second finds a file that ends too soon."""

    def __iter__(self):
        if get_worker_info().id == 0:
            return
        yield from range(4)
        raise EOFError("image.jpg is truncated")


def test_an_error_of_a_stream_is_its_own_although_another_worker_is_done(clock):
    batches = iter(make(Truncated(), sampler=None))
    assert next(batches) == [0, 1]
    batches._workers[0].join(30)
    with pytest.raises(EOFError, match="image.jpg is truncated"):
        list(batches)


def test_a_kept_worker_that_has_ended_is_replaced(clock, caplog):
    loader = make(Bad(print), sampler=InferenceSampler(8), persistent_workers=True)
    first, before = [*loader], pids()
    for process in multiprocessing.active_children():
        process.terminate()
        process.join()

    assert [*loader] == first
    assert len(pids()) == 2
    assert not {*pids()} & {*before}
    assert "workers of the last pass over the data are replaced" in caplog.text


def test_a_negative_timeout_is_refused():
    with pytest.raises(ValueError, match="timeout must be >= 0 s, got -1"):
        make(Bad(hang), timeout=-1)
