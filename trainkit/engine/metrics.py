"""The path of a step's losses into the storage: averaged over ranks, and in a thread of their own if asked for."""

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

from trainkit.engine.losses import Losses, as_losses, describe_failure, raise_failure
from trainkit.utils import comm
from trainkit.utils.comm import tree_sum
from trainkit.utils.device import new_event, runs_ahead, wait_for
from trainkit.utils.events.storage import (
    MAX_ROWS,
    EventStorage,
    get_event_storage,
    storage_of_thread,
)
from trainkit.utils.events.worker import Numbers
from trainkit.utils.periods import check_period, is_nth, iterations_of

# names that the trainer, default hooks or writers store
STORED_BESIDE_LOSSES = frozenset(
    {"data_time", "rank_data_time", "skipped_updates", "[metric]grad_scaler"}
    | {"iteration", "epoch", "lr", "time", "eta_seconds"}
)
_HAND_OVER_ITERS = 10  # a worker gets after this number of iterations what waits for a device
# exchange after this number, even if few are stored, so that a failure is noticed
_MOST_RECORDS = 1000
_MOST_AHEAD = 2  # steps: each step ahead holds device memory
_MOST_VALUES = 64  # the largest number of values in a row of an exchanged block


class DirectCalls:
    """detectron2's ``concurrent_executor``: makes a call at once, since `_write_metrics` waits for nothing."""

    def submit(self, call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)


class Row(NamedTuple):
    """What one iteration gives to the storage; ``data_time`` in seconds, values by name.

    ``single_name``: the name of a loss that is alone on this rank. Its value is ``total_loss``; it is stored under both
    names only if another rank has other losses. ``prefix``: of all names in the storage.
    """

    iter: int
    data_time: float
    values: dict[str, Any]
    is_stored: bool = True
    single_name: str = ""
    prefix: str = ""


class MetricPath:
    """Takes the losses of each step to the storage of the run.

    On one process with a CPU they become a row of the storage at once. Otherwise they wait here: until the device has
    them, or until the ranks exchange the rows of ``exchange_period`` iterations in one block, in the same iterations
    on every rank.

    Args:
        trainer: a weak reference; its ``look(iter, values)`` describes what is not finite, or returns None. It is
            called in the order of the iterations, with the storage of the run as the open one.
        asynchronous: a worker of the storage does the work.
    """

    def __init__(
        self, trainer: Any, gather_period: int, exchange_period: int, asynchronous: bool
    ) -> None:
        self._trainer, self._asynchronous = trainer, asynchronous
        self.gather_period = check_period("gather_metric_period", gather_period, minimum=1)
        self.exchange_period = check_period("exchange_period", exchange_period, minimum=1)
        self.reset()

    def reset(self) -> None:
        """Forget the rows of a run that failed; call it when a run starts."""
        self._rows: list[Row] = []  # their values are tensors
        self._recent: deque[Any] = deque()  # events of the newest steps on a device that runs ahead
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
        """Take the losses of an iteration, and ``extra`` values; those between two gather periods are only looked at.

        Raises:
            FloatingPointError: an iteration was not finite; on all ranks in the same exchange. On a CPU in one process
                it is this iteration. From a worker it comes at most 20 iterations later.
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
            failure = self._look(storage, iter, values)
            if failure is not None:
                raise_failure([failure])
            if is_stored:
                row = Row(iter, data_time, values, prefix=prefix)
                _put(storage, row, row)
                if len(storage.rows) >= MAX_ROWS:
                    storage.hand_over()
        else:
            tensors = {**losses.scalars, **extra}
            row = Row(iter, data_time, tensors, is_stored, losses.single_name, prefix)
            self._keep(row, storage, losses.total.device)

    def _keep(self, row: Row, storage: EventStorage, device: torch.device) -> None:
        self._rows.append(row)
        if runs_ahead(device):
            self._recent.append(new_event(device))
            if len(self._recent) > _MOST_AHEAD:
                wait_for(self._recent.popleft())
        if self._is_alone:
            storage.before_read = self._pass_on
            due = len(self._rows) >= _HAND_OVER_ITERS * (1 if self._asynchronous else 2)
        else:
            due = row.iter + 1 == self._trainer.max_iter or is_nth(
                row.iter + 1, self.exchange_period
            )
            due = (due and any(row.is_stored for row in self._rows)) or len(
                self._rows
            ) >= _MOST_RECORDS
        if due:
            self._pass_on(storage)

    def finish(self, storage: EventStorage) -> None:
        """Exchange and store the remaining rows, and wait for that; every rank calls it at the same point.

        Raises:
            FloatingPointError: on every rank, if an iteration was not finite on one of them.
        """
        self._pass_on(storage)
        storage.flush()

    def _pass_on(self, storage: EventStorage) -> None:
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        numbers = Numbers([value for row in rows for value in row.values.values()])
        if self._asynchronous:
            worker = storage.start_worker()
            part = storage.split_off()
            worker.submit(part, partial(self._store, rows, numbers, part))
            worker.collect(leave_newest=1)  # so that an error is known at the next hand-over
        else:
            self._store(rows, numbers, storage)

    def _look(self, storage: EventStorage, iter: int, values: dict[str, Any]) -> str | None:
        """Let the trainer judge the numbers of an iteration; ``storage`` is the open one."""
        if storage_of_thread() is storage:  # the usual case
            failure: str | None = self._trainer.look(iter, values)
        else:
            with storage:
                failure = self._trainer.look(iter, values)
        return failure

    def _store(self, rows: Sequence[Row], numbers: Numbers, storage: EventStorage) -> None:
        """Store in the order of the iterations; after the exchange, all ranks raise the first failure together."""
        if self._has_failed and self._asynchronous:
            return  # the loops may be at different iterations: no rank exchanges the rest
        read, stored, failure = iter(numbers.read()), [], None
        for row in rows:
            values = {name: next(read) for name in row.values}
            found = self._look(storage, row.iter, values)
            if failure is None and found is not None:
                failure = row.iter, found
            if row.is_stored:
                stored.append(row._replace(values=values))
        means, failures = exchange_rows(
            stored, math.ceil(iterations_of(self.exchange_period)), failure
        )
        self._has_failed = any(failures)
        for row, mean in zip(stored, means, strict=True):
            if not self._has_failed or all(map(math.isfinite, mean.values.values())):
                _put(storage, row, mean)
        # the others come from it
        first = min(failed[0] for failed in failures if failed) if self._has_failed else 0
        raise_failure([failed[1] if failed and failed[0] == first else None for failed in failures])


def _put(storage: EventStorage, own: Row, mean: Row) -> None:
    values = {"rank_data_time": own.data_time, "data_time": mean.data_time}
    for name, value in mean.values.items():
        values[own.prefix + name] = value
    storage.rows.append((own.iter, values))


def write_metrics(
    loss_dict: Mapping[str, Tensor | float], data_time: float, cur_iter: int, prefix: str = ""
) -> None:
    """Average losses over ranks and put them into the open storage; for trainers with their own ``run_step``.

    Every rank calls it; the names may differ. ``total_loss`` is the sum of the entries that require grad, or of all if
    none does. ``data_time`` is in seconds.

    Raises:
        FloatingPointError: the total is not finite on some rank.
        ValueError: there is no entry, or one is not one number.
    """
    losses = as_losses(loss_dict)
    scalars = losses.scalars
    values = dict(zip(scalars, Numbers([*scalars.values()]).read(), strict=True))
    own = Row(cur_iter, data_time, values, single_name=losses.single_name, prefix=prefix)
    [mean], _ = exchange_rows([own], 1, purpose="write_metrics")
    if not math.isfinite(mean.values["total_loss"]):
        raise FloatingPointError(describe_failure("loss is", cur_iter, mean.values))
    _put(get_event_storage(), own, mean)


# ---------------------------------------------------------------------- over ranks


def exchange_rows(
    rows: Sequence[Row],
    most: int,
    failure: tuple[int, str] | None = None,
    *,
    purpose: str = "metrics",
) -> tuple[Sequence[Row], list[tuple[int, str] | None]]:
    """Returns rows with the means over ranks and the longest ``data_time``, and the failure of each rank.

    The result is the same on every rank. There is one exchange of a block whose size depends on ``most`` alone. If
    a rank has failed, or other names, all of them notice this in the exchange and make a second one.

    Args:
        failure: the iteration and the text.
        most: the largest possible number of rows, the same on every rank.
        purpose: names the process group, see `comm.side_group`; calls in two threads need two purposes.
    """
    group = comm.side_group(purpose)
    if group is None:
        return rows, [failure]
    # the size is equal on all ranks; else Gloo silently mixes up data
    block = np.zeros((1 + most, 1 + _MOST_VALUES))
    names = "\n".join(name for row in rows for name in ("", row.single_name, *row.values))
    fits = all(len(row.values) <= _MOST_VALUES for row in rows)
    block[0, :3] = (
        len(rows),
        zlib.crc32(names.encode("utf-8", "backslashreplace")),
        failure is not None or not fits,
    )
    for line, row in zip(block[1:], rows if fits else (), strict=False):
        line[: 1 + len(row.values)] = row.data_time, *row.values.values()
    every = torch.empty(comm.get_world_size(), *block.shape, dtype=torch.float64, device="cpu")
    dist.all_gather([*every.unbind()], torch.from_numpy(block), group=group)
    blocks = every.numpy()
    if blocks[:, 0, 2].any() or (blocks[:, 0, :2] != block[0, :2]).any():
        by_rank = comm.all_gather(([*rows], failure), group=group)
        all_rows = [theirs for theirs, _ in by_rank]
        return [_mean(i, all_rows)._replace(iter=row.iter) for i, row in enumerate(rows)], [
            text for _, text in by_rank
        ]
    means, longest = (
        (tree_sum(blocks[:, 1:, 1:]) / len(blocks)).tolist(),
        blocks[:, 1:, 0].max(0).tolist(),
    )
    return [
        Row(row.iter, sec, dict(zip(row.values, values, strict=False)))
        for row, sec, values in zip(rows, longest, means, strict=False)
    ], [None]


def _mean(i: int, by_rank: Sequence[Sequence[Row]]) -> Row:
    """The mean of row ``i`` over ranks; an entry is averaged over the ranks that have it."""
    rows = [theirs[i] for theirs in by_rank if i < len(theirs)]
    if len({row.single_name for row in rows}) > 1:
        rows = [_with_single_loss(row) for row in rows]
    found = {
        name: [row.values[name] for row in rows if name in row.values]
        for row in rows
        for name in row.values
    }
    means = {name: sum(values) / len(values) for name, values in found.items()}
    return Row(rows[0].iter, max(row.data_time for row in rows), means)


def _with_single_loss(row: Row) -> Row:
    """The row with a loss that is alone under its own name too."""
    if not row.single_name or "total_loss" not in row.values:
        return row
    return row._replace(values={**row.values, row.single_name: row.values["total_loss"]})
