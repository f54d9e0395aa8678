"""The path of a step's losses into the storage.

`parse_losses` reads what the model has returned. The step gives it to `MetricPath`, which lets the
trainer judge the numbers, and averages them over ranks; if asked for, in a thread of their own.
They become rows of the `EventStorage`, whose next reader moves them into a `HistoryBuffer` for each
name. Writers show the values from there.
"""

import math
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.engine.finite import describe_failure, raise_failure
from trainkit.engine.losses import Losses, as_losses
from trainkit.utils import comm
from trainkit.utils.comm import tree_sum
from trainkit.utils.device import new_event, runs_ahead, wait_for
from trainkit.utils.events.numbers import Numbers
from trainkit.utils.events.storage import MAX_ROWS, EventStorage, get_event_storage
from trainkit.utils.periods import check_period, is_nth, iterations_of

# names that the trainer, default hooks or writers store
STORED_BESIDE_LOSSES = frozenset(
    {
        "data_time",
        "rank_data_time",
        "skipped_updates",
        "[metric]grad_scaler",
        "iteration",
        "epoch",
        "lr",
        "time",
        "eta_seconds",
    }
)
# a worker gets after this number of iterations the rows that wait for a device
_HAND_OVER_ITERS = 10
# exchange after this number of rows, even if few are stored, so that a failure is noticed
_MOST_ROWS = 1000
_MOST_AHEAD = 2  # steps: each step ahead holds device memory
_MOST_VALUES = 64  # the largest number of values in a row of an exchanged block


class DirectCalls:
    """detectron2's ``concurrent_executor``: makes each call at once.

    `_write_metrics` waits for nothing.
    """

    def submit(self, call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)


class Row(NamedTuple):
    """What one iteration gives to the storage.

    Attributes:
        data_time: in seconds.
        values: name -> number, or a tensor that is read later.
        is_stored: False: the values are only looked at.
        single_name: the name of a loss that is alone on this rank. Its value is ``total_loss``; it
            is stored under both names only if another rank has other losses.
        prefix: of all names in the storage.
    """

    iter: int
    data_time: float
    values: dict[str, Any]
    is_stored: bool = True
    single_name: str = ""
    prefix: str = ""


class MetricPath:
    """Takes the losses of each step to the storage of the run.

    On one process with a CPU they become a row of the storage at once. Otherwise they wait here:
    until the device has them, or until the ranks exchange the rows of ``exchange_period``
    iterations in one block, in the same iterations on every rank.

    Args:
        trainer: a weak reference; its ``judge_numbers(storage, iter, values)`` describes the values
            that are not finite, or returns None. It is called in the order of the iterations.
        gather_period: in iterations; the losses of every so many are stored.
        asynchronous: a worker of the storage does the work.
    """

    def __init__(
        self, trainer: Any, gather_period: int, exchange_period: int, asynchronous: bool
    ) -> None:
        self._trainer = trainer
        self._asynchronous = asynchronous
        self.gather_period = check_period("gather_metric_period", gather_period, minimum=1)
        self.exchange_period = check_period("exchange_period", exchange_period, minimum=1)
        self.reset()

    def reset(self) -> None:
        """Forget the rows of a run that failed; call it when a run starts."""
        self._rows: list[Row] = []  # their values are tensors
        # events of the newest steps on a device that runs ahead
        self._recent: deque[Any] = deque()
        # whether there are no other ranks; None before the first step
        self._is_alone: bool | None = None
        # whether the numbers can be read at once, and are those of all ranks
        self._is_direct = False
        self._has_failed = False

    def add(
        self,
        storage: EventStorage,
        iter: int,
        data_time: float,
        losses: Losses,
        extra: Mapping[str, Tensor],
        prefix: str = "",
    ) -> None:
        """Take the losses of an iteration, and ``extra`` values.

        Those between two gather periods are only looked at.

        Raises:
            FloatingPointError: an iteration was not finite; on all ranks in the same exchange. On a
                CPU in one process it is this iteration. From a worker it comes at most 20
                iterations later.
        """
        if self._is_alone is None:
            self._is_alone = comm.get_world_size() == 1
            self._is_direct = self._is_alone and not runs_ahead(losses.total.device)
        if self._asynchronous:
            storage.start_worker()
        is_stored = (iter + 1) % self.gather_period == 0
        if self._is_direct:
            values = losses.read()
            for name, value in extra.items():
                values[name] = value.item()
            failure = self._trainer.judge_numbers(storage, iter, values)
            if failure is not None:
                raise_failure([failure])
            if is_stored:
                _put(storage, iter, data_time, data_time, values, prefix)
                if len(storage.rows) >= MAX_ROWS:
                    storage.hand_over()
        else:
            tensors = {**losses.scalars, **extra}
            row = Row(iter, data_time, tensors, is_stored, losses.single_name, prefix)
            self._keep(row, storage, losses.total.device)

    def _keep(self, row: Row, storage: EventStorage, device: torch.device) -> None:
        """Let a row wait, and store all that wait if it is time for that."""
        self._rows.append(row)
        if runs_ahead(device):
            self._recent.append(new_event(device))
            if len(self._recent) > _MOST_AHEAD:
                wait_for(self._recent.popleft())
        if self._is_alone:
            storage.before_read = self._store_waiting
            most_waiting = _HAND_OVER_ITERS if self._asynchronous else 2 * _HAND_OVER_ITERS
            is_due = len(self._rows) >= most_waiting
        else:
            is_due = self._is_exchange_due(row.iter + 1)
        if is_due:
            self._store_waiting(storage)

    def _is_exchange_due(self, done: int) -> bool:
        """Whether the ranks exchange their rows after ``done`` iterations; equal on all ranks."""
        if len(self._rows) >= _MOST_ROWS:
            return True
        if done != self._trainer.max_iter and not is_nth(done, self.exchange_period):
            return False
        return any(row.is_stored for row in self._rows)

    def finish(self, storage: EventStorage) -> None:
        """Exchange and store the remaining rows, and wait for that.

        Every rank calls it at the same point.

        Raises:
            FloatingPointError: on every rank, if an iteration was not finite on one of them.
        """
        self._store_waiting(storage)
        storage.flush()

    def _store_waiting(self, storage: EventStorage) -> None:
        """Exchange and store the rows that wait here: now, or in the worker, without waiting."""
        if not self._rows:
            return
        rows = self._rows
        self._rows = []
        values: list[Any] = []
        for row in rows:
            values.extend(row.values.values())
        numbers = Numbers(values)
        if self._asynchronous:
            worker = storage.start_worker()
            part = storage.split_off()
            worker.submit(part, partial(self._store, rows, numbers, part))
            worker.collect(leave_newest=1)  # so that an error is known at the next hand-over
        else:
            self._store(rows, numbers, storage)

    def _store(self, rows: Sequence[Row], numbers: Numbers, storage: EventStorage) -> None:
        """Store in the order of the iterations.

        After the exchange, all ranks raise the first failure together.
        """
        if self._has_failed and self._asynchronous:
            return  # the loops may be at different iterations: no rank exchanges the rest
        number = iter(numbers.read())
        stored = []
        failure = None
        for row in rows:
            values = {name: next(number) for name in row.values}
            text = self._trainer.judge_numbers(storage, row.iter, values)
            if text is not None and failure is None:
                failure = (row.iter, text)
            if row.is_stored:
                stored.append(row._replace(values=values))
        max_rows = math.ceil(iterations_of(self.exchange_period))
        means, failures = exchange_rows(stored, max_rows, failure)
        self._has_failed = any(failures)
        for row, mean in zip(stored, means, strict=True):
            if not self._has_failed or all(map(math.isfinite, mean.values.values())):
                _put(storage, row.iter, row.data_time, mean.data_time, mean.values, row.prefix)
        if self._has_failed:
            raise_failure(_first_failures(failures))


def _first_failures(failures: Sequence[tuple[int, str] | None]) -> list[str | None]:
    """For each rank the text, if it failed in the first iteration with a failure.

    Failures of later iterations come from the first one.
    """
    first_iter = min(failure[0] for failure in failures if failure is not None)
    texts: list[str | None] = []
    for failure in failures:
        if failure is not None and failure[0] == first_iter:
            texts.append(failure[1])
        else:
            texts.append(None)
    return texts


def _put(
    storage: EventStorage,
    iter: int,
    own_data_time: float,
    longest_data_time: float,
    values: dict[str, Any],
    prefix: str,
) -> None:
    """Add a row to the storage, with the means over all ranks.

    Not by `EventStorage.put_scalars`: the trainer's own names need no check in each step.
    """
    if prefix:
        values = {prefix + name: value for name, value in values.items()}
    times = {"rank_data_time": own_data_time, "data_time": longest_data_time}
    storage.rows.append((iter, {**times, **values}))


def write_metrics(
    loss_dict: Mapping[str, Tensor | float], data_time: float, cur_iter: int, prefix: str = ""
) -> None:
    """Average losses over ranks and put them into the open storage.

    For trainers with their own ``run_step``. Every rank calls it; the names may differ.
    ``total_loss`` is the sum of the entries that require grad, or of all if none does.
    ``data_time`` is in seconds.

    Raises:
        FloatingPointError: the total is not finite on some rank.
        ValueError: there is no entry, or one is not one number.
    """
    losses = as_losses(loss_dict)
    scalars = losses.scalars
    numbers = Numbers([*scalars.values()]).read()
    values = dict(zip(scalars, numbers, strict=True))
    own = Row(cur_iter, data_time, values, single_name=losses.single_name, prefix=prefix)
    [mean], _ = exchange_rows([own], 1, purpose="write_metrics")
    if not math.isfinite(mean.values["total_loss"]):
        raise FloatingPointError(describe_failure("loss is", cur_iter, mean.values))
    _put(get_event_storage(), cur_iter, data_time, mean.data_time, mean.values, prefix)


# ---------------------------------------------------------------------- over ranks


def exchange_rows(
    rows: Sequence[Row],
    max_rows: int,
    failure: tuple[int, str] | None = None,
    *,
    purpose: str = "metrics",
) -> tuple[Sequence[Row], list[tuple[int, str] | None]]:
    """Returns rows with the means over ranks, and the failure of each rank.

    The ``data_time`` of a row is the longest one. The result is the same on every rank. There is
    one exchange of a block whose size depends on ``max_rows`` alone. If a rank has failed, or other
    names, all of them notice this in the exchange and make a second one.

    Args:
        failure: the iteration and the text.
        max_rows: the largest possible number of rows, the same on every rank.
        purpose: names the process group, see `comm.side_group`; calls in two threads need two
            purposes.
    """
    group = comm.side_group(purpose)
    if group is None:
        return rows, [failure]
    fits = all(len(row.values) <= _MOST_VALUES for row in rows)
    # the size is equal on all ranks; else Gloo silently mixes up data
    block = np.zeros((1 + max_rows, 1 + _MOST_VALUES))
    header = block[0]
    header[0] = len(rows)
    header[1] = _checksum_of_names(rows)
    header[2] = failure is not None or not fits  # this rank asks for the second exchange
    if fits:
        for line, row in zip(block[1:], rows, strict=False):
            line[0] = row.data_time
            line[1 : 1 + len(row.values)] = list(row.values.values())
    gathered = torch.empty(comm.get_world_size(), *block.shape, dtype=torch.float64, device="cpu")
    dist.all_gather([*gathered.unbind()], torch.from_numpy(block), group=group)
    blocks = gathered.numpy()
    headers = blocks[:, 0]
    has_same_names = (headers[:, :2] == header[:2]).all()
    if has_same_names and not headers[:, 2].any():
        return _means_of_blocks(rows, blocks), [None]

    by_rank = comm.all_gather(([*rows], failure), group=group)
    rows_by_rank = [rows_there for rows_there, _ in by_rank]
    failures = [failure_there for _, failure_there in by_rank]
    means = [_mean(i, rows_by_rank)._replace(iter=row.iter) for i, row in enumerate(rows)]
    return means, failures


def _checksum_of_names(rows: Sequence[Row]) -> int:
    names = []
    for row in rows:
        names += ["", row.single_name, *row.values]
    return zlib.crc32("\n".join(names).encode("utf-8", "backslashreplace"))


def _means_of_blocks(rows: Sequence[Row], blocks: np.ndarray) -> list[Row]:
    """The means of rows that have the same names on all ranks.

    Args:
        blocks: of all ranks, see `exchange_rows`; after the header, one line for each row with its
            ``data_time`` and its values.
    """
    lines = blocks[:, 1:]
    means = (tree_sum(lines[:, :, 1:]) / len(blocks)).tolist()
    longest_sec = lines[:, :, 0].max(0).tolist()
    mean_rows = []
    for row, data_time, values in zip(rows, longest_sec, means, strict=False):
        named = dict(zip(row.values, values, strict=False))
        mean_rows.append(Row(row.iter, data_time, named))
    return mean_rows


def _mean(i: int, rows_by_rank: Sequence[Sequence[Row]]) -> Row:
    """The mean of row ``i`` over ranks; an entry is averaged over the ranks that have it."""
    rows = [rows_there[i] for rows_there in rows_by_rank if i < len(rows_there)]
    if len({row.single_name for row in rows}) > 1:
        rows = [_with_single_loss(row) for row in rows]
    values_of: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.values.items():
            values_of.setdefault(name, []).append(value)
    means = {name: sum(values) / len(values) for name, values in values_of.items()}
    longest_sec = max(row.data_time for row in rows)
    return Row(rows[0].iter, longest_sec, means)


def _with_single_loss(row: Row) -> Row:
    """The row, with the loss under its own name too if it is alone on its rank."""
    if not row.single_name or "total_loss" not in row.values:
        return row
    return row._replace(values={**row.values, row.single_name: row.values["total_loss"]})
