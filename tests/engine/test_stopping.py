"""What asks a run to stop, and after which step its ranks do."""

import logging
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from tests.two_ranks import SLOW, on_two_ranks
from trainkit.engine.stopping import Stop, StopRequests

SIGTERM, SIGINT, SIGHUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.fixture(autouse=True)
def received():
    """What reaches the handlers from before `listening`."""
    found = []
    former = [
        *((signum, signal.signal(signum, lambda signum, frame: found.append(signum))) for signum in (SIGTERM, SIGHUP)),
        (SIGINT, signal.signal(SIGINT, signal.default_int_handler)),  # a process in the background ignores it
    ]
    yield found
    for signum, handler in former:
        signal.signal(signum, handler)


# ---------------------------------------------------------------------- one process


def test_one_process_stops_at_once_when_it_was_asked_to():
    stops = StopRequests()
    assert (stops.pending, stops.agreed(6), stops.agree_now()) == (False, None, None)
    stops.request("enough")
    assert stops.pending
    assert stops.agreed(7) == stops.agreed(8) == stops.agree_now() == Stop("enough", None)


def test_a_signal_counts_before_a_request():
    stops = StopRequests()
    stops.request("enough")
    stops.request("SIGTERM", SIGTERM)
    stops.request("SIGINT", SIGINT)
    assert stops.agreed(0) == Stop("SIGTERM", SIGTERM)


def test_the_log_says_once_who_was_asked_by_what(caplog):
    stops = StopRequests()
    stops.request("SIGTERM", SIGTERM)
    with caplog.at_level(logging.INFO, logger="trainkit.engine.stopping"):
        stops.agreed(0)
        stops.agreed(1)
    assert caplog.messages == ["Rank 0 was asked to stop: SIGTERM"]


# ---------------------------------------------------------------------- signals


@pytest.mark.parametrize("signum", [SIGTERM, SIGINT, SIGHUP])
def test_a_signal_is_a_request_inside_and_what_it_was_before_outside(signum, received):
    stops = StopRequests()
    handlers = [signal.getsignal(signum)]
    with stops.listening():
        signal.raise_signal(signum)
    handlers.append(signal.getsignal(signum))
    assert stops.agreed(0) == Stop(signum.name, signum)
    assert handlers[0] == handlers[1]
    assert received == []
    signal.raise_signal(SIGTERM)
    assert received == [SIGTERM]


def test_a_second_ctrl_c_interrupts_and_the_first_says_so(capfd):
    stops = StopRequests()
    with stops.listening():
        signal.raise_signal(SIGINT)
        assert capfd.readouterr().err == "\nStopping after this step; once more ends at once\n"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(SIGINT)
    assert stops.agreed(0) == Stop("SIGINT", SIGINT)
    assert capfd.readouterr().err == ""


def test_a_signal_that_comes_twice_at_once_is_one(received, capfd):
    stops = StopRequests()
    with stops.listening():
        signal.raise_signal(SIGTERM)
        signal.raise_signal(SIGTERM)
    assert stops.agreed(0) == Stop("SIGTERM", SIGTERM)
    assert received == []
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("signum", [SIGTERM, SIGINT, SIGHUP])
def test_a_signal_that_is_ignored_stays_ignored(signum):
    signal.signal(signum, signal.SIG_IGN)
    stops = StopRequests()
    with stops.listening():
        signal.raise_signal(signum)
        signal.raise_signal(signum)
    assert not stops.pending
    assert signal.getsignal(signum) == signal.SIG_IGN


def test_a_thread_that_is_not_the_main_one_takes_no_signals():
    found = []

    def listen():
        with StopRequests().listening():
            found.append(signal.getsignal(SIGTERM))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(SIGTERM)]


def test_of_nested_ones_the_innermost_takes_the_signal():
    outer, inner = StopRequests(), StopRequests()
    with outer.listening():
        with inner.listening():
            signal.raise_signal(SIGTERM)
        assert (outer.pending, inner.pending) == (False, True)
        signal.raise_signal(SIGTERM)
    assert outer.pending


# ---------------------------------------------------------------------- two ranks


def run(stops, requests, period=20):
    """Steps with requests in them, iter -> arguments: (the last iteration, what ended the run)."""
    stops.reset(period)
    with stops.listening():
        for iter in range(60):
            if iter in requests:
                stops.request(*requests[iter])
            stop = stops.agreed(iter)
            if stop is not None:
                return iter, tuple(stop)
    return None


def on_rank(number, rank, requests):
    return requests if rank == number else {}


def ask_rank_1(rank, folder):
    """(check_period, step of the request on rank 1) -> last step."""
    cases = [(20, 3), (20, 10), (20, 11), (5, 4), (5, 5), (3, 3), (2, 3), (1, 3)]
    return {(period, at): run(StopRequests(), on_rank(1, rank, {at: ("enough",)}), period) for period, at in cases}


def ask_rank_0_at_each_step(rank, folder):
    """check_period -> how many steps behind the request the run ends, for each step."""
    return {
        period: [run(StopRequests(), on_rank(0, rank, {at: ("enough",)}), period)[0] - at for at in range(period)]
        for period in range(1, 8)
    }


def ask_both(rank, folder):
    stops = StopRequests()
    return [
        run(stops, {0: (f"rank {rank}",)}),
        run(stops, [{0: ("enough",)}, {0: ("SIGTERM", 15)}][rank]),
        run(stops, [{0: ("SIGINT", 2)}, {0: ("SIGTERM", 15)}][rank]),
        run(stops, [{2: ("late on rank 0",)}, {0: ("early on rank 1",)}][rank]),
    ]


def agree_between_the_steps(rank, folder):
    stops = StopRequests()
    stops.reset(20)
    found = [stops.agreed(0), stops.agreed(1)]
    if rank == 1:
        stops.request("enough")
    found += [stops.pending, stops.agree_now(), stops.agreed(2)]
    stops.reset(20)
    return [*found, stops.pending, stops.agree_now()]


def one_rank_is_ahead(rank, folder):
    """Rank 0 goes through steps that rank 1 starts only when it is told that rank 0 has left them."""
    stops = StopRequests()
    stops.reset(20)
    if rank == 1:
        dist.recv(torch.zeros(1), src=0)
    found = [stops.agreed(iter) for iter in range(10)]
    if rank == 0:
        dist.send(torch.zeros(1), dst=1)
    return found


def leave_without_an_error(rank, folder):
    """Whether rank 1 had come to the exchange that is under way when rank 0 has left."""
    stops, reached = StopRequests(), os.path.join(folder, "reached")
    stops.reset(20)
    if rank == 1:
        dist.recv(torch.zeros(1), src=0)
        open(reached, "x").close()
    with stops.listening():
        stops.agreed(0)
        if rank == 0:
            dist.send(torch.zeros(1), dst=1)
    return os.path.exists(reached)


def leave_by_an_error(rank, folder):
    """Rank 1 starts the exchange that is under way only when it is told that rank 0 has left."""
    stops = StopRequests()
    stops.reset(20)
    if rank == 1:
        dist.recv(torch.zeros(1), src=0)
        return stops.agreed(0)
    try:
        with stops.listening():
            stops.agreed(0)
            raise ZeroDivisionError
    except ZeroDivisionError:
        dist.send(torch.zeros(1), dst=1)
    return None


CHECKS = [
    *(
        ask_rank_1,
        ask_rank_0_at_each_step,
        ask_both,
        agree_between_the_steps,
    ),
    *(one_rank_is_ahead, leave_without_an_error, leave_by_an_error),
]


@pytest.fixture(scope="module", params=SLOW)
def found(tmp_path_factory):
    return on_two_ranks(CHECKS, tmp_path_factory.mktemp("ranks"))


def test_a_request_on_one_rank_stops_both_after_the_same_step(found):
    stopped = {(20, 3): 20, (20, 10): 20, (20, 11): 30, (5, 4): 6, (5, 5): 8, (3, 3): 4, (2, 3): 4, (1, 3): 3}
    assert found["ask_rank_1"] == [{case: (iter, ("enough", None)) for case, iter in stopped.items()}] * 2


def test_the_run_ends_less_than_a_period_behind_the_request(found):
    behind = {
        1: [0],
        2: [1, 1],
        3: [1] * 3,
        4: [2, 3, 2, 3],
        5: [2, 3, 2, 3, 2],
        6: [3, 5, 4] * 2,
        7: [3, 5, 4] * 2 + [3],
    }
    assert found["ask_rank_0_at_each_step"] == [behind] * 2


def test_signals_count_first_and_then_the_lowest_rank_that_was_asked(found):
    stopped = [(10, ("rank 0", None)), (10, ("SIGTERM", 15)), (10, ("SIGINT", 2)), (10, ("late on rank 0", None))]
    assert found["ask_both"] == [stopped] * 2


def test_ranks_can_agree_at_once_with_an_exchange_under_way(found):
    stop = Stop("enough", None)
    assert found["agree_between_the_steps"] == [
        [None, None, False, stop, stop, False, None],
        [None, None, True, stop, stop, False, None],
    ]


def test_no_rank_waits_for_another_inside_a_period(found):
    assert found["one_rank_is_ahead"] == [[None] * 10] * 2


def test_a_rank_that_leaves_waits_for_the_exchange_under_way_unless_it_failed(found):
    assert found["leave_without_an_error"] == [True, True]
    assert found["leave_by_an_error"] == [None, None]


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has no SIGUSR1")
def test_a_handler_of_the_program_stays_and_outside_of_slurm_sigusr1_is_its_own(monkeypatch):
    def inside():
        with StopRequests().listening():
            return signal.getsignal(signal.SIGUSR1)

    own = lambda signum, frame: None  # noqa: E731
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert inside() not in (signal.SIG_DFL, None)
    former = signal.signal(signal.SIGUSR1, own)
    try:
        assert inside() is own
    finally:
        signal.signal(signal.SIGUSR1, former)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert inside() == signal.SIG_DFL
