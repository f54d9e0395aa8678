"""The path of a step's losses into the storage: averaged over ranks, and in a thread of their own if asked for."""

import math
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.engine.finite import describe_failure, raise_failure
from trainkit.utils import comm
from trainkit.utils.comm import tree_sum
from trainkit.utils.device import new_event, runs_ahead
from trainkit.utils.events import EventStorage, get_event_storage, has_event_storage
from trainkit.utils.events.later import Numbers
from trainkit.utils.events.storage import MAX_ROWS, own_stack
from trainkit.utils.losses import Losses
from trainkit.utils.periods import check_period, is_nth

# names that the trainer, default hooks or writers store
STORED_BESIDE_LOSSES = frozenset(
    {"data_time", "rank_data_time", "skipped_updates", "[metric]grad_scaler"}
    | {"iteration", "epoch", "lr", "time", "eta_seconds", "epoch_time"}
)
_HAND_OVER_ITERS = 10  # a worker gets what waits after this number of iterations, and has ended the hand-over before
_MOST_RECORDS = 1000  # exchange after this number, even if few are stored, so that a failure is noticed
_MOST_AHEAD = 2  # steps: each step ahead holds device memory


class MetricWorker:
    """A pool of one worker: it waits for the device, exchanges metrics, stores them and calls the writers."""

    def __init__(self, storage: EventStorage) -> None:
        self._storage = storage
        self._pool = ThreadPoolExecutor(1, "trainkit-metrics", initializer=own_stack)
        self._jobs: deque[Future[EventStorage]] = deque()
        self._error: BaseException | None = None  # the first one since it was raised

    def submit(self, part: EventStorage, call: Callable[[], object] | None = None) -> None:
        """Store what waits in ``part``, then call ``call()`` with it as the open storage. Does not wait."""
        self._jobs.append(self._pool.submit(self._do, part, call))

    def _do(self, part: EventStorage, call: Callable[[], object] | None) -> EventStorage:
        with part:
            try:
                part.flush()
                if call is not None:
                    call()
                    part.flush()
            except BaseException as error:  # later jobs are done all the same
                self._error = self._error or error
        return part

    def wait(self, *, but: int = 0) -> None:
        """Wait for all jobs, ``but`` the newest ones; raise the first error since the last call."""
        number = len(self._jobs) - but
        self._storage.take_back([self._jobs.popleft().result() for _ in range(number)])
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the first error since the last call; does not wait."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        self._pool.shutdown()


class LaterCalls:
    """detectron2's ``concurrent_executor``: the worker of the open storage makes the calls, in their order."""

    def submit(self, call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Call ``call(*args, **kwargs)`` in the worker; if it raises, the run ends at most 20 iterations later."""
        comm.side_group("write_metrics")  # created here, in the thread of the loop
        storage = get_event_storage()
        if storage.worker is None:
            storage.worker = MetricWorker(storage)
        storage.publish(partial(call, *args, **kwargs))


class StepRecord(NamedTuple):
    """What one iteration gives to the storage; ``data_time`` in seconds, scalars of shape ``[]``."""

    iter: int
    data_time: float
    scalars: dict[str, Tensor]
    is_stored: bool


class Row(NamedTuple):
    """A `StepRecord` whose numbers are on the host."""

    iter: int
    data_time: float
    values: dict[str, float]


class MetricPath:
    """Takes the losses of each step to the open storage.

    On one process with a CPU they become rows of the storage at once. Otherwise they wait here: until the device has
    them, or until the ranks exchange the records of ``exchange_period`` iterations in one block, in the same iterations
    on every rank.

    Args:
        trainer: a weak reference; its ``look(iter, values)`` describes what is not finite, or returns None. It is
            called in the order of the iterations.
        asynchronous: a `MetricWorker` does the work.
    """

    def __init__(
        self,
        trainer: Any,
        gather_period: int,
        exchange_period: int,
        asynchronous: bool,
    ) -> None:
        self._trainer, self._asynchronous = trainer, asynchronous
        self.gather_period = check_period("gather_metric_period", gather_period, minimum=1)
        self.exchange_period = check_period("exchange_period", exchange_period, minimum=1)
        self.reset()

    def reset(self) -> None:
        """Forget the records of a run that failed; call it when a run starts."""
        self._records: list[StepRecord] = []
        self._recent: deque[Any] = deque()  # events of the newest steps on a device that runs ahead
        self._handed_over = -1  # the iteration
        self._is_alone: bool | None = None
        self._is_direct = False  # whether the numbers can be read at once, and are those of all ranks
        self._has_failed = False

    def add(
        self,
        iter: int,
        data_time: float,
        scalars: dict[str, Tensor],
        *,
        is_last: bool = False,
        is_stored: bool = True,
    ) -> None:
        """Take the scalars of an iteration, ``total_loss`` among them; without ``is_stored`` they are only looked at.

        Raises:
            FloatingPointError: an iteration was not finite; on all ranks in the same exchange. On a CPU in one process
                it is this iteration. From a worker it comes at most 20 iterations later.
        """
        storage, device = get_event_storage(), scalars["total_loss"].device
        if self._is_alone is None:
            self._is_alone = comm.side_group("metrics") is None  # created here, in the thread of the loop
            self._is_direct = self._is_alone and not runs_ahead(device)
        if self._asynchronous and storage.worker is None:
            storage.worker = MetricWorker(storage)
        is_stored = is_stored and (iter + 1) % self.gather_period == 0
        if self._is_direct:
            if (failure := self._trainer.look(iter, scalars)) is not None:
                raise_failure([failure])
            if is_stored:
                rows = storage.rows
                rows += [(iter, "rank_data_time", data_time, None), (iter, "data_time", data_time, None)]
                for name, value in scalars.items():
                    rows.append((iter, name, value, None))
                if len(storage.rows) >= MAX_ROWS:
                    storage.hand_over()
        else:
            self._keep(StepRecord(iter, data_time, scalars, is_stored), storage, device, is_last)
        if self._asynchronous and iter - self._handed_over >= _HAND_OVER_ITERS:
            self._handed_over = iter
            if self._is_alone:
                self._pass_on(storage)
            storage.hand_over()
            storage.worker.wait(but=2)  # type: ignore[union-attr]  # those of this hand-over

    def _keep(self, record: StepRecord, storage: EventStorage, device: torch.device, is_last: bool) -> None:
        self._records.append(record)
        if runs_ahead(device):
            self._recent.append(new_event(device))
            if len(self._recent) > _MOST_AHEAD:
                self._recent.popleft().synchronize()
        if self._is_alone:
            storage.before_read = self._pass_on
            due = len(self._records) >= 2 * _HAND_OVER_ITERS
        else:
            due = is_last or is_nth(record.iter + 1, self.exchange_period)
            due = (due and any(record.is_stored for record in self._records)) or len(self._records) >= _MOST_RECORDS
        if due:
            self._pass_on(storage)

    def finish(self) -> None:
        """Exchange and store the remaining records, and wait for that; every rank calls it at the same point.

        Raises:
            FloatingPointError: on every rank, if an iteration was not finite on one of them.
        """
        if has_event_storage():
            self._pass_on(get_event_storage())
            get_event_storage().flush()

    def _pass_on(self, storage: EventStorage) -> None:
        if not self._records:
            return
        records, self._records = self._records, []
        numbers = Numbers([value for record in records for value in record.scalars.values()])
        if storage.worker is not None:
            storage.worker.submit(storage.take(), partial(self._store, records, numbers))
        else:
            self._store(records, numbers, storage)

    def _store(self, records: Sequence[StepRecord], numbers: Numbers, storage: EventStorage | None = None) -> None:
        """Store in the order of the iterations; after the exchange, all ranks raise the first failure together."""
        if self._has_failed and self._asynchronous:
            return  # the loops may be at different iterations: no rank exchanges the rest
        values, rows, failure = iter(numbers.read()), [], None
        for record in records:
            row = Row(record.iter, record.data_time, {name: next(values) for name in record.scalars})
            found = self._trainer.look(record.iter, row.values)
            failure = failure or found
            if record.is_stored:
                rows.append(row)
        means, failures = exchange_rows(rows, self.exchange_period, failure)
        self._has_failed = any(failures)
        for row, mean in zip(rows, means, strict=True):
            if not self._has_failed or all(map(math.isfinite, mean.values.values())):
                _put(storage or get_event_storage(), row.iter, row.data_time, mean.data_time, mean.values)
        raise_failure(failures)


def _put(storage: EventStorage, iter: int, own_sec: float, longest_sec: float, values: Mapping[str, Any]) -> None:
    own = {"rank_data_time": own_sec, "data_time": longest_sec}
    storage.rows += [(iter, name, value, None) for name, value in {**own, **values}.items()]


def write_metrics(loss_dict: Mapping[str, Tensor | float], data_time: float, cur_iter: int, prefix: str = "") -> None:
    """Average losses over ranks and put them into the open storage; for trainers with their own ``run_step``.

    Every rank calls it; the names may differ. ``total_loss`` is the sum of the entries that require grad, or of all if
    none does. ``data_time`` is in seconds.

    Raises:
        FloatingPointError: the total is not finite on some rank.
        ValueError: there is no entry.
    """
    if not loss_dict:
        raise ValueError("loss_dict is empty; there is nothing to write")
    tensors = {name: torch.as_tensor(value) for name, value in loss_dict.items()}
    trained = [name for name, value in tensors.items() if value.requires_grad] or list(tensors)
    scalars = Losses(tensors, trained).scalars
    values = dict(zip(scalars, Numbers([value.detach() for value in scalars.values()]).read(), strict=True))
    [mean], _ = exchange_rows([Row(cur_iter, data_time, values)], 1, purpose="write_metrics")
    if not math.isfinite(mean.values["total_loss"]):
        raise FloatingPointError(describe_failure("loss is", cur_iter, mean.values))
    named = {prefix + name: value for name, value in mean.values.items()}
    _put(get_event_storage(), cur_iter, data_time, mean.data_time, named)


# ---------------------------------------------------------------------- over ranks

_MOST_VALUES = 64  # the largest number of values in a row of the block


def exchange_rows(
    rows: Sequence[Row], most: int, failure: str | None = None, *, purpose: str = "metrics"
) -> tuple[list[Row], list[str | None]]:
    """Returns rows with the means over ranks and the longest ``data_time``, and the failure of each rank.

    The result is the same on every rank. There is one exchange of a block whose size depends on ``most`` alone. If
    ranks have different names, all of them notice this in the exchange and make a second one.

    Args:
        most: the largest possible number of rows, the same on every rank.
        purpose: names the process group, see `comm.side_group`; calls in two threads need two purposes.
    """
    group = comm.side_group(purpose)
    if group is None:
        return [*rows], [failure]
    block = np.zeros((1 + most, 1 + _MOST_VALUES))  # the size is equal on all ranks; else Gloo silently mixes up data
    names = "\n".join(name for row in rows for name in ("", *row.values))
    block[0, :3] = len(rows), zlib.crc32(names.encode("utf-8", "backslashreplace")), failure is not None
    fits = all(len(row.values) <= _MOST_VALUES for row in rows)
    for line, row in zip(block[1:], rows, strict=False):
        line[0] = row.data_time
        if fits:
            line[1 : 1 + len(row.values)] = [*row.values.values()]
    every = torch.empty(comm.get_world_size(), *block.shape, dtype=torch.float64, device="cpu")
    dist.all_gather([*every.unbind()], torch.from_numpy(block), group=group)
    blocks = every.numpy()
    failures: list[str | None] = [None]
    if blocks[:, 0, 2].any():
        failures = comm.all_gather(failure, group=group)
    if fits and (blocks[:, 0, :2] == block[0, :2]).all():
        means, longest = (tree_sum(blocks[:, 1:, 1:]) / len(blocks)).tolist(), blocks[:, 1:, 0].max(0).tolist()
        exchanged = [
            Row(row.iter, sec, dict(zip(row.values, values, strict=False)))
            for row, sec, values in zip(rows, longest, means, strict=False)
        ]
    else:
        by_rank = comm.all_gather([*rows], group=group)
        exchanged = [_mean(i, by_rank)._replace(iter=row.iter) for i, row in enumerate(rows)]
    return exchanged, failures


def _mean(i: int, by_rank: Sequence[Sequence[Row]]) -> Row:
    """The mean of row ``i`` over ranks; an entry is averaged over the ranks that have it."""
    rows = [theirs[i] for theirs in by_rank if i < len(theirs)]
    found = {name: [row.values[name] for row in rows if name in row.values] for row in rows for name in row.values}
    means = {name: sum(values) / len(values) for name, values in found.items()}
    return Row(rows[0].iter, max(row.data_time for row in rows), means)
