"""What asks a run to stop, and after which step its ranks do."""

import logging
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.two_ranks import SLOW, on_two_ranks
from trainkit.engine.stopping import Stop, StopRequests

SIGTERM, SIGINT, SIGHUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.fixture(autouse=True)
def received():
    """What reaches the handlers from before `listening`."""
    found = []
    handlers = {signum: lambda signum, frame: found.append(signum) for signum in (SIGTERM, SIGHUP)}
    handlers |= {SIGINT: signal.default_int_handler}  # a process in the background ignores it
    handlers |= {signal.SIGUSR1: signal.SIG_DFL}
    former = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    yield found
    for signum, handler in former.items():
        signal.signal(signum, handler)


def test_one_process_stops_at_once_when_it_was_asked_to_and_a_signal_counts_before_a_request(
    caplog,
):
    caplog.set_level(logging.INFO, logger="trainkit.engine.stopping")
    stops = StopRequests()
    assert stops.pending is False
    assert stops.agreed(6) is None
    assert stops.agree_now() is None
    stops.request("enough")
    stops.request("SIGTERM", SIGTERM)
    stops.request("SIGINT", SIGINT)
    assert stops.pending
    assert stops.agreed(7) == stops.agreed(8) == stops.agree_now() == Stop("SIGTERM", SIGTERM)
    [text] = caplog.messages  # once
    assert text.startswith("Rank 0 ")
    assert text.endswith(": SIGTERM")


@pytest.mark.parametrize("signum", [SIGTERM, SIGHUP])
def test_a_signal_is_a_request_inside_and_what_it_was_before_outside(signum, received):
    outer, inner = StopRequests(), StopRequests()
    before = signal.getsignal(signum)
    with outer.listening():
        with inner.listening():
            signal.raise_signal(signum)
            signal.raise_signal(signum)  # twice at once is one
        assert outer.pending is False
        assert inner.agreed(0) == Stop(signum.name, signum)
        assert received == []
    assert signal.getsignal(signum) == before


def test_a_second_ctrl_c_interrupts_and_the_first_says_so(capfd):
    stops = StopRequests()
    with stops.listening():
        signal.raise_signal(SIGINT)
        [line] = capfd.readouterr().err.split("\n")[1:-1]
        assert "after this step" in line
        assert "once more" in line
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(SIGINT)
    assert stops.agreed(0) == Stop("SIGINT", SIGINT)
    assert capfd.readouterr().err == ""
    assert signal.getsignal(SIGINT) == signal.default_int_handler


def run(stops, requests, period=20):
    """Steps with requests in them, iter -> arguments: (the last iteration, what ended the run)."""
    stops.reset(period)
    with stops.listening():
        for iter in range(60):
            if iter in requests:
                stops.request(*requests[iter])
            if (stop := stops.agreed(iter)) is not None:
                return iter, tuple(stop)
    return None


def ask_one_at_each_step(rank, folder):
    """(rank that is asked, check_period) -> how many steps after the request the run ends, for each step."""
    return {
        (asked, period): [
            run(StopRequests(), {at: ("enough",)} if rank == asked else {}, period)[0] - at
            for at in range(period)
        ]
        for asked, period in ((1, 20), *((0, period) for period in range(1, 8)))
    }


def ask_both(rank, folder):
    stops = StopRequests()
    return [
        run(stops, {0: (f"rank {rank}",)}),
        run(stops, [{0: ("enough",)}, {0: ("SIGTERM", 15)}][rank]),
        run(stops, [{0: ("SIGINT", 2)}, {0: ("SIGTERM", 15)}][rank]),
        run(stops, [{2: ("late on rank 0",)}, {1: ("early on rank 1",)}][rank]),
    ]


def agree_between_the_steps(rank, folder):
    stops = StopRequests()
    stops.reset(20)
    assert stops.agreed(0) is None
    assert stops.agreed(1) is None
    if rank == 1:
        stops.request("enough")
    assert stops.pending == (rank == 1)
    at_once, next_step = stops.agree_now(), stops.agreed(2)
    stops.reset(20)
    assert not stops.pending
    return {"at once": at_once, "next step": next_step, "after a reset": stops.agree_now()}


CHECKS = [ask_one_at_each_step, ask_both, agree_between_the_steps]


@pytest.fixture(scope="module", params=SLOW)
def found(tmp_path_factory):
    return on_two_ranks(CHECKS, tmp_path_factory.mktemp("ranks"))


def test_a_request_on_one_rank_stops_both_after_the_same_step_less_than_a_period_later(found):
    first, second = found["ask_one_at_each_step"]
    assert first == second
    for (_, period), later in first.items():
        assert max(later) < period
    # they ask each other at every sixth step
    assert first[0, 6] == [0, 5, 4, 3, 2, 1]


def test_signals_count_first_and_then_the_lowest_rank_that_was_asked(found):
    stopped = [
        (0, ("rank 0", None)),
        (0, ("SIGTERM", 15)),
        (0, ("SIGINT", 2)),
        (20, ("late on rank 0", None)),
    ]
    assert found["ask_both"] == [stopped] * 2


def test_ranks_can_agree_at_once_between_the_steps_at_which_they_ask_each_other(found):
    stop = Stop("enough", None)
    for of_rank in found["agree_between_the_steps"]:
        assert of_rank == {"at once": stop, "next step": stop, "after a reset": None}


def test_ignored_signals_and_handlers_of_the_program_stay_and_a_thread_takes_none(monkeypatch):
    def inside(signum):
        with StopRequests().listening():
            signal.raise_signal(SIGHUP)
            return signal.getsignal(signum)

    with ThreadPoolExecutor(1) as pool:  # in which SIGTERM cannot be taken
        signal.signal(SIGHUP, signal.SIG_IGN)
        assert pool.submit(inside, SIGTERM).result() == signal.getsignal(SIGTERM)
    assert inside(SIGHUP) == signal.SIG_IGN
    assert inside(signal.SIGUSR1) == signal.SIG_DFL
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert inside(signal.SIGUSR1) not in (signal.SIG_DFL, None)
    signal.signal(signal.SIGUSR1, own := lambda signum, frame: None)
    assert inside(signal.SIGUSR1) is own
