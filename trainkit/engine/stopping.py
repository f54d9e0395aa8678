"""Stop requests, and the agreement of all ranks on the last step."""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from trainkit.utils import comm
from trainkit.utils.env import stop_signals
from trainkit.utils.periods import check_period

logger = logging.getLogger(__name__)

_PATIENCE_SEC = 30.0  # after a signal; as long as torchrun waits before it kills the ranks
_ONE_SIGNAL_SEC = 2.0  # a terminal, a scheduler and torchrun may all send the same signal


class Stop(NamedTuple):
    """The end of a run: ``signum`` is the signal, or None for another request."""

    reason: str
    signum: int | None = None


class StopRequests:
    """The stop requests of this rank, and the agreement of all ranks.

    Every few steps the ranks share one number.

    Attributes:
        stop: the agreed stop, the same on every rank; None: the run continues.
    """

    def __init__(self) -> None:
        self._requests: list[Stop] = []
        self._num_looks = 0  # the number of steps after which the loop has looked here
        self._is_agreed = threading.Event()
        self.stop: Stop | None = None
        self._group: dist.ProcessGroup | None = None

    def reset(self, check_period_iters: int) -> None:
        """Forget all requests; every rank calls it in the thread of the loop when a run starts."""
        self._check_period = check_period("stop_check_period", check_period_iters, minimum=1)
        self._requests = []
        self.stop = None
        self._is_agreed.clear()
        self._group = comm.side_group("requests")

    def request(self, reason: str, signum: int | None = None) -> None:
        """Request a stop, from any thread or a signal handler.

        Of several requests a signal wins, else the first.
        """
        # one operation, so a signal cannot interrupt it
        self._requests.append(Stop(reason, signum))

    @property
    def pending(self) -> bool:
        """Whether this rank was asked to stop."""
        return bool(self._requests)

    def agreed(self, done: int) -> Stop | None:
        """``stop``; every rank calls it after each step, with the number of steps that are done."""
        self._num_looks += 1
        if self._group is None:
            if self._requests:
                self.agree_now()
        elif done % self._check_period == 0:
            self.agree_now()
        return self.stop

    def agree_now(self) -> Stop | None:
        """Like `agreed`, at any time; every rank calls it, and waits for the others."""
        if self.stop is not None or not self._is_any_asked():
            return self.stop
        by_rank = [self._own_request()]
        if self._group is not None:
            by_rank = comm.all_gather(by_rank[0], group=self._group)
        chosen_rank = 0
        for rank, request in enumerate(by_rank):
            if _wins(request, by_rank[chosen_rank]):
                chosen_rank = rank
        self.stop = by_rank[chosen_rank]
        assert self.stop is not None
        self._is_agreed.set()
        logger.info("Rank %d was asked to stop: %s", chosen_rank, self.stop.reason)
        return self.stop

    def _own_request(self) -> Stop | None:
        chosen: Stop | None = None
        for request in self._requests:
            if _wins(request, chosen):
                chosen = request
        return chosen

    def _is_any_asked(self) -> bool:
        if self._group is None:
            return self.pending
        flag = torch.tensor(int(self.pending), dtype=torch.int32, device="cpu")
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def pass_on(self, progress: str) -> None:
        """If a signal has stopped the run, raise what the signal itself would raise.

        That is KeyboardInterrupt or SystemExit. Python prints a KeyboardInterrupt last, so its
        message says where the run stands.
        """
        if self.stop is None or self.stop.signum is None:
            return
        if self.stop.signum == signal.SIGINT:
            raise KeyboardInterrupt(
                f"training has stopped {progress}. For code that must run after train(), catch "
                "KeyboardInterrupt"
            )
        raise SystemExit(128 + self.stop.signum)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Context in which the signals of `stop_signals` request a stop, in the main thread.

        A second SIGINT has the effect that it had before this context. A second signal of another
        kind ends the process, and so does the first one if no step ends in 30 s: its data, an
        evaluator or a writer hangs. An ignored signal, as under nohup, stays ignored, and a
        program's own handler of SIGUSR1 stays.
        """
        former: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            former = _handlers_to_replace()
        first_at: float | None = None

        def ask(signum: int, frame: FrameType | None) -> None:
            nonlocal first_at
            now = time.monotonic()
            self.request(signal.Signals(signum).name, signum)
            if first_at is None:
                first_at = now
                threading.Thread(target=self._end_if_it_hangs, args=(signum,), daemon=True).start()
            elif signum != signal.SIGINT and now - first_at > _ONE_SIGNAL_SEC:
                _end(signum, "a second signal came")
            if signum == signal.SIGINT:
                signal.signal(signum, former[signum])
                if multiprocessing.parent_process() is None:  # else the parent prints the line
                    _say("Stopping after this step; once more ends at once")

        try:
            for signum in former:
                signal.signal(signum, ask)
            yield
        finally:
            for signum, handler in former.items():
                signal.signal(signum, handler)
            self._is_agreed.set()

    def _end_if_it_hangs(self, signum: int) -> None:
        num_looks = -1
        while num_looks != self._num_looks:
            num_looks = self._num_looks
            if self._is_agreed.wait(_PATIENCE_SEC):
                return
        _end(
            signum,
            f"no step has ended for {_PATIENCE_SEC:.0f} s: its data, an evaluator or a writer may "
            "hang",
        )


def _wins(request: Stop | None, other: Stop | None) -> bool:
    """Whether a request is chosen before another one, which came earlier: only a signal is."""
    if request is None:
        return False
    if other is None:
        return True
    return request.signum is not None and other.signum is None


def _handlers_to_replace() -> dict[int, Any]:
    """signal -> its handler, of those signals of `stop_signals` that request a stop."""
    handlers: dict[int, Any] = {}
    for each in stop_signals():
        handler = signal.getsignal(each)
        if handler is None or handler == signal.SIG_IGN:
            # None: it was not set by Python, which cannot restore it
            continue
        is_programs_own = each.name == "SIGUSR1" and handler != signal.SIG_DFL
        if not is_programs_own:
            handlers[each] = handler
    return handlers


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # no print and no log: the signal may have interrupted one
        os.write(2, f"\n{text}\n".encode())


def _end(signum: int, reason: str) -> None:
    _say(f"The run ends without a new checkpoint, {reason}; --resume continues from the last one")
    os._exit(128 + signum)
