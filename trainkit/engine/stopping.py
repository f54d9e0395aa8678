"""How a run learns that it is to stop, and how its ranks agree after which step."""

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

from trainkit.engine.periods import check_period
from trainkit.utils import comm, waiting
from trainkit.utils.waiting import Abandoned, Waiter

logger = logging.getLogger(__name__)

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")  # Windows has no SIGHUP
_RANKS_WAIT_SEC = 20.0  # torchrun kills after 30 s
_HINT = b"\nStopping after this step; once more ends at once\n"


class Stop(NamedTuple):
    """What ends a run: ``signum`` is the signal, or None if it was asked for otherwise."""

    reason: str
    signum: int | None = None

    @property
    def exit_code(self) -> int:
        """Of the process, as a shell gives it."""
        return 0 if self.signum is None else 128 + self.signum

    def pass_on(self) -> None:
        """Raise KeyboardInterrupt or SystemExit, as the signal would have done; nothing if it was no signal."""
        if self.signum == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signum is not None:
            raise SystemExit(self.exit_code)


def _never() -> bool:
    return False


class StopRequests(Waiter):
    """What asks this rank to stop, and the agreement of all ranks on it.

    The ranks exchange a flag beside the steps, started at every ``check_period // 2``-th of them and read at the next
    such step, so that none waits for another.
    """

    def __init__(self, check_period: int = 20) -> None:
        self.check_period = check_period
        self._requests: list[Stop] = []
        self._asked_at = 0.0
        self._may_abandon = _never
        self._agreed: Stop | None = None
        self._group: dist.ProcessGroup | None = None
        self._exchange: tuple[dist.Work, torch.Tensor] | None = None

    @property
    def check_period(self) -> int:
        return self._check_period

    @check_period.setter
    def check_period(self, period: int) -> None:
        self._check_period = check_period("stop_check_period", period, minimum=1)

    def request(self, reason: str, signum: int | None = None) -> None:
        """Ask for a stop; from any thread, and from a signal handler. The first one counts, a signal before others."""
        if not self._requests:
            self._asked_at = time.monotonic()
        self._requests.append(Stop(reason, signum))  # one operation: nothing can come in between

    def look_up(self) -> None:
        """Called while the thread of the run waits for data, and when a signal comes.

        Raises:
            Abandoned: this one process was asked to stop, and has waited for `waiting.POLL_SEC`.
            RuntimeError: so has one of several, for `_RANKS_WAIT_SEC`; the others wait for it, so none can save.
        """
        if not self._requests or self.since is None:
            return
        now, reason = time.monotonic(), self._requests[0].reason
        if self._group is None:
            if now - self.since >= waiting.POLL_SEC and self._may_abandon():
                raise Abandoned(reason)
        elif now - max(self._asked_at, self.since) >= _RANKS_WAIT_SEC:
            raise RuntimeError(
                f"asked to stop ({reason}), and no data came for {now - self.since:.0f} s, while the other ranks wait "
                "for this one: the run ends without a checkpoint of where it stands; --resume goes on from the last one"
            )

    @property
    def pending(self) -> bool:
        """Whether this rank was asked to stop."""
        return bool(self._requests)

    def reset(self) -> None:
        """Forget what was asked for; every rank calls it in the thread of the loop when a run starts."""
        self._requests, self._agreed, self._exchange = [], None, None
        self._group = comm.side_group("stopping")

    def agreed(self, iter: int) -> Stop | None:
        """What ends the run here, the same on every rank; every rank calls it after each step, with its number."""
        if self._group is None:
            return self.agree_now() if self._requests else None
        if self._agreed is None and iter % max(self.check_period // 2, 1) == 0:
            if self.check_period == 1:
                self._start_exchange()
            if self._read_exchange():
                return self.agree_now()
            if self.check_period > 1:
                self._start_exchange()
        return self._agreed

    def agree_now(self) -> Stop | None:
        """As `agreed`, and waits for all ranks."""
        if self._agreed is None:
            mine = min(self._requests, key=lambda stop: stop.signum is None, default=None)
            by_rank = [mine] if self._group is None else comm.all_gather(mine, group=self._group)
            asked = [(stop.signum is None, rank, stop) for rank, stop in enumerate(by_rank) if stop is not None]
            if asked:
                _, rank, self._agreed = min(asked)
                logger.info("Rank %d was asked to stop: %s", rank, self._agreed.reason)
        return self._agreed

    @contextlib.contextmanager
    def listening(self, may_abandon: Callable[[], bool] = _never) -> Iterator[None]:
        """Inside, SIGTERM, SIGINT and SIGHUP (a closed terminal) are requests, if this is the main thread.

        A second SIGINT is what it was before. A signal that is ignored, as under nohup, stays ignored. Waiting for data
        is abandoned if ``may_abandon()``. Leaving it without an error waits for the last exchange of the ranks.
        """
        former: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            signums = [signal.Signals[name] for name in _SIGNALS if hasattr(signal, name)]
            former = {signum: signal.getsignal(signum) for signum in signums}
            # None is a handler that Python does not know and could not put back
            former = {signum: handler for signum, handler in former.items() if handler not in (None, signal.SIG_IGN)}

        def ask(signum: int, frame: FrameType | None) -> None:
            self.request(signal.Signals(signum).name, signum)
            if signum == signal.SIGINT:
                signal.signal(signum, former[signum])
                if multiprocessing.parent_process() is None:  # else that one says it
                    with contextlib.suppress(OSError):
                        os.write(2, _HINT)  # a handler may interrupt a print or a log call, so neither may be used
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
        """Whether any rank was asked to stop when the exchange under way started; waits for that one."""
        if self._exchange is None:
            return False
        (work, flag), self._exchange = self._exchange, None
        work.wait()
        return bool(flag)
