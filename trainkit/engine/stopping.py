"""Stop requests, and the agreement of all ranks on the last step."""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from trainkit.utils import comm, waiting
from trainkit.utils.env import stop_signals
from trainkit.utils.periods import check_period
from trainkit.utils.waiting import Abandoned, Waiter

logger = logging.getLogger(__name__)

_RANKS_WAIT_SEC = 20.0  # torchrun kills the ranks after 30 s


class Stop(NamedTuple):
    """The end of a run: ``signum`` is the signal, or None for another request."""

    reason: str
    signum: int | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of the process, as in a shell."""
        return 0 if self.signum is None else 128 + self.signum


def _never() -> bool:
    return False


class StopRequests(Waiter):
    """The stop requests of this rank, and the agreement of all ranks.

    Ranks exchange a flag in the background, so that no rank waits for another. At every ``check_period // 2``-th step
    they read the result of the last exchange and start the next one.

    Attributes:
        stop: the agreed stop, the same on every rank; None: the run continues.
    """

    def __init__(self, check_period: int = 20) -> None:
        self.check_period = check_period
        self._requests: list[Stop] = []
        self._asked_at = 0.0
        self._may_abandon = _never
        self.stop: Stop | None = None
        self._group: dist.ProcessGroup | None = None
        self._exchange: tuple[dist.Work, torch.Tensor] | None = None

    @property
    def check_period(self) -> int:
        return self._check_period

    @check_period.setter
    def check_period(self, period: int) -> None:
        self._check_period = check_period("stop_check_period", period, minimum=1)

    def request(self, reason: str, signum: int | None = None) -> None:
        """Request a stop, from any thread or a signal handler. Of several requests a signal wins, else the first."""
        if not self._requests:
            self._asked_at = time.monotonic()
        self._requests.append(Stop(reason, signum))  # one operation, so a signal cannot interrupt it

    def look_up(self, lost: bool = False) -> None:
        """Called while the thread of the run waits for data, and when a signal comes.

        Raises:
            Abandoned: a single process was asked to stop and has waited for `waiting.POLL_SEC`, or the data are lost.
            RuntimeError: one of several processes has waited for `_RANKS_WAIT_SEC`; the others wait for it, so no rank
                can save.
        """
        if not self._requests or self.since is None:
            return
        now, reason = time.monotonic(), self._requests[0].reason
        if self._group is None:
            if (lost or now - self.since >= waiting.POLL_SEC) and self._may_abandon():
                raise Abandoned(reason)
        elif now - max(self._asked_at, self.since) >= _RANKS_WAIT_SEC:
            raise RuntimeError(
                f"asked to stop ({reason}), but no data came for {now - self.since:.0f} s, while the other ranks wait "
                "for this one: the run ends without a new checkpoint; --resume continues from the last one"
            )

    @property
    def pending(self) -> bool:
        """Whether this rank was asked to stop."""
        return bool(self._requests)

    def reset(self) -> None:
        """Forget all requests; every rank calls it in the thread of the loop when a run starts."""
        self._requests, self.stop, self._exchange = [], None, None
        self._group = comm.side_group("stopping")

    def agreed(self, iter: int) -> Stop | None:
        """``stop``; every rank calls it after each step."""
        if self._group is None:
            return self.agree_now() if self._requests else self.stop
        if self.stop is None and iter % max(self.check_period // 2, 1) == 0:
            if self.check_period == 1:
                self._start_exchange()
            if self._read_exchange():
                return self.agree_now()
            if self.check_period > 1:
                self._start_exchange()
        return self.stop

    def agree_now(self) -> Stop | None:
        """Like `agreed`, but it waits for all ranks."""
        if self.stop is None:
            mine = min(self._requests, key=lambda stop: stop.signum is None, default=None)
            by_rank = [mine] if self._group is None else comm.all_gather(mine, group=self._group)
            asked = [(stop.signum is None, rank, stop) for rank, stop in enumerate(by_rank) if stop is not None]
            if asked:
                _, rank, self.stop = min(asked)
                logger.info("Rank %d was asked to stop: %s", rank, self.stop.reason)
        return self.stop

    def pass_on(self) -> None:
        """If a signal has stopped the run, raise KeyboardInterrupt or SystemExit, as the signal itself would."""
        if self.stop is not None and self.stop.signum == signal.SIGINT:
            raise KeyboardInterrupt
        if self.stop is not None and self.stop.signum is not None:
            raise SystemExit(self.stop.exit_code)

    @contextlib.contextmanager
    def listening(self, may_abandon: Callable[[], bool] = _never) -> Iterator[None]:
        """Context in which the signals of `stop_signals` request a stop, if this is the main thread.

        A second SIGINT has the effect that it had before this context. An ignored signal, as under nohup, stays
        ignored, and a program's own handler of SIGUSR1 stays. Waiting for data is abandoned if ``may_abandon()``. At
        the end, without an error, it waits for the last exchange of the ranks.
        """
        former: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for each in stop_signals():
                handler = signal.getsignal(each)  # None: the handler was not set by Python, which cannot restore it
                is_ours = handler == signal.SIG_DFL or getattr(handler, "__module__", "") == __name__
                if (is_ours or each.name != "SIGUSR1") and handler not in (None, signal.SIG_IGN):
                    former[each] = handler

        def ask(signum: int, frame: FrameType | None) -> None:
            self.request(signal.Signals(signum).name, signum)
            if signum == signal.SIGINT:
                signal.signal(signum, former[signum])
                if multiprocessing.parent_process() is None:  # otherwise the parent prints the line
                    with contextlib.suppress(OSError):  # no print and no log: the signal may have interrupted one
                        os.write(2, b"\nStopping after this step; once more ends at once\n")
            self.look_up()

        self._may_abandon = may_abandon
        token = waiting.waiter.set(self)
        try:
            for signum in former:
                signal.signal(signum, ask)
            yield
            self._read_exchange()  # every rank has started it
        finally:
            for signum, handler in former.items():
                signal.signal(signum, handler)
            waiting.waiter.reset(token)
            self._may_abandon, self._exchange = _never, None

    def _start_exchange(self) -> None:
        flag = torch.tensor([self.pending], dtype=torch.int32)
        self._exchange = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True), flag

    def _read_exchange(self) -> bool:
        """Whether any rank had a request when the current exchange started; waits for the exchange."""
        if self._exchange is None:
            return False
        (work, flag), self._exchange = self._exchange, None
        work.wait()
        return bool(flag)
