"""Move the losses of a step from the device to the storage, and average them over ranks."""

import math
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.engine.finite import FiniteCheck, describe_failure, raise_failure
from trainkit.utils import comm
from trainkit.utils.device import new_event, runs_ahead
from trainkit.utils.events import get_event_storage, has_event_storage
from trainkit.utils.losses import Losses
from trainkit.utils.numbers import tree_sum
from trainkit.utils.periods import check_period, is_nth

SCALE = "[metric]grad_scaler"  # stored in each iteration, as in detectron2
FLAG = "[flag]not_finite"  # `FiniteCheck.flag` of an update; not stored
# names that the trainer, default hooks or writers store
STORED_BESIDE_LOSSES = frozenset(
    {"data_time", "rank_data_time", "skipped_updates", SCALE, FLAG}
    | {"iteration", "epoch", "lr", "time", "eta_seconds", "epoch_time"}
)
_MOST_RECORDS = 1000  # exchange after this number, even if few are stored, so that a failure is noticed


def check_losses(losses: Losses, *, has_norm: bool = False) -> None:
    """Check what a model returns in its first step.

    Args:
        has_norm: whether the trainer stores the norm of the gradients.

    Raises:
        ValueError: a loss has a name that the trainer stores itself.
    """
    stored = STORED_BESIDE_LOSSES | ({"grad_norm"} if has_norm else set())
    if taken := sorted(losses.values.keys() & stored):
        raise ValueError(f"the trainer stores {taken} itself; give the model's entry another name")


@torch.no_grad()
def pack(scalars: Mapping[str, Tensor]) -> Tensor:
    """The scalars of one iteration, float64, on the device of the total loss."""
    device = scalars["total_loss"].device  # a logged entry may be on another device
    return torch.stack([scalar.to(device, torch.float64, non_blocking=True) for scalar in scalars.values()])


class StepRecord:
    """The scalars of one iteration; if the device runs ahead, they are copied to the host as one small tensor.

    Attributes:
        arrived: the event of the end of this copy; None: there is nothing to wait for.
        written: names of values that the trainer's own ``_write_metrics`` stores; empty: it has none.
    """

    arrived: Any = None
    written: Collection[str] = ()
    _host: Tensor | None = None

    def __init__(
        self, scalars: Mapping[str, Tensor], data_time: float, iter: int, packed: Tensor | None = None
    ) -> None:
        """
        Args:
            scalars: name -> value, shape ``[]``: the total, the losses, other values to store, and `FLAG`.
            data_time: in seconds.
            packed: the result of `pack`, if it exists already.
        """
        self.data_time, self.iter = data_time, iter
        device = scalars["total_loss"].device
        if not runs_ahead(device):
            self._values = {name: scalar.item() for name, scalar in scalars.items()}
            return
        if packed is None:
            packed = pack(scalars)
        self._names = list(scalars)
        self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True).copy_(packed, non_blocking=True)
        self.arrived = new_event(device)

    def read(self) -> dict[str, float]:
        """name -> value. Waits until they are on the host."""
        if self._host is not None:
            self.arrived.synchronize()
            self._values = dict(zip(self._names, self._host.tolist(), strict=True))
        return self._values

    def is_known_to_fail(self) -> bool:
        """Whether the values are on the host already, and the total or the update is not finite."""
        return self.arrived is None and not (math.isfinite(self._values["total_loss"]) and not self._values.get(FLAG))


class Row(NamedTuple):
    """The values of one iteration to store; ``data_time`` in seconds."""

    iter: int
    data_time: float
    values: dict[str, float]


def put_row(mean: Row, rank_data_time: float, prefix: str = "") -> None:
    """Put a row from `exchange_rows` and the rank's own ``data_time`` into the open storage."""
    storage, values = get_event_storage(), mean.values
    if prefix:
        values = {prefix + name: value for name, value in values.items()}
    storage.put_row({"rank_data_time": rank_data_time, "data_time": mean.data_time, **values}, cur_iter=mean.iter)


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
    values = StepRecord(Losses.of(tensors, trained).scalars, data_time, cur_iter).read()
    [mean], _ = exchange_rows([Row(cur_iter, data_time, values)], 1, purpose="write_metrics")
    if not math.isfinite(mean.values["total_loss"]):
        raise FloatingPointError(describe_failure("loss is", cur_iter, mean.values))
    put_row(mean, data_time, prefix)


class LaterCalls:
    """detectron2's ``concurrent_executor``: the worker of the open storage makes the calls, in their order."""

    def submit(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call ``call(*args, **kwargs)`` in the worker; if it raises, the run ends at most 20 iterations later."""
        comm.side_group("write_metrics")  # created here, in the thread of the loop
        _put_later(partial(call, *args, **kwargs))


def _put_later(call: Callable[..., None], *args: Any) -> None:
    storage = get_event_storage()
    storage.start_deferring()
    storage.put_later(call, *args)
    if comm.get_world_size() > 1:
        storage.hand_over()  # now: the other ranks wait for this rank


class MetricPath:
    """Takes the record of each step, checks it, averages it over ranks, and stores it.

    One rank stores a record at once. Several ranks exchange the records of ``exchange_period`` iterations in one block,
    in the same iterations on every rank. If ``asynchronous``, the worker of the storage waits for the device, exchanges
    and stores.

    Attributes:
        exchange_period: in iterations.
    """

    def __init__(self, finite: FiniteCheck, gather_period: int, exchange_period: int, asynchronous: bool) -> None:
        self._finite, self._asynchronous = finite, asynchronous
        self.gather_period = check_period("gather_metric_period", gather_period, minimum=1)
        self.exchange_period = check_period("exchange_period", exchange_period, minimum=1)
        self.reset()

    def reset(self) -> None:
        """Forget the records of a run that failed."""
        self._records: list[StepRecord] = []  # since the last exchange
        self._recent: deque[StepRecord] = deque(maxlen=3)
        self._has_failed = False

    def add(self, record: StepRecord, *, is_last: bool = False) -> None:
        """Store the record, or keep it until the next exchange; with ``is_last`` exchange now.

        Raises:
            FloatingPointError: an iteration was not finite; on all ranks in the same exchange. If asynchronous, on the
                rank itself if it has the numbers already, else in the worker.
        """
        self._records.append(record)
        if record.arrived is not None:
            self._recent.append(record)
            if len(self._recent) == 3:  # bound how far the host runs ahead: each step ahead holds device memory
                self._recent[0].arrived.synchronize()
        if comm.side_group("metrics") is None:  # the group is created here, in the thread of the loop
            self._pass_on()
            return
        due = is_last or is_nth(record.iter + 1, self.exchange_period)
        if (due and any(map(self._is_stored, self._records))) or len(self._records) >= _MOST_RECORDS:
            self._pass_on()

    def finish(self) -> None:
        """Exchange and store the remaining records, and wait for that; every rank calls it at the same point.

        Raises:
            FloatingPointError: on every rank, if an iteration was not finite on one of them.
        """
        if has_event_storage():
            if self._records:
                self._pass_on()
            get_event_storage().flush()

    def _pass_on(self) -> None:
        records, self._records = self._records, []
        if not self._asynchronous:
            self._store(records)
            return
        fails = self._finite.policy == "raise" and any(record.is_known_to_fail() for record in records)
        _put_later(self._store, records)
        if fails:
            get_event_storage().flush()  # raises the error of the worker here, before the update

    def _store(self, records: Sequence[StepRecord]) -> None:
        """Store in the order of the iterations; after the exchange, all ranks raise the first failure together."""
        if self._has_failed and self._asynchronous:
            return  # the loops may be at different iterations: no rank exchanges the rest
        rows, stored, failure = [], list[StepRecord](), None
        for record in records:
            values = record.read()
            found = self._finite.look(record.iter, values, values.pop(FLAG, 0) != 0)
            failure = failure or found
            counts = {SCALE: values.pop(SCALE)} if SCALE in values else {}
            if self._is_stored(record):
                if self._finite.skips:
                    counts["skipped_updates"] = self._finite.skipped
                rows.append(Row(record.iter, record.data_time, values))
                stored.append(record)
            if counts:  # counts are equal on all ranks, and must not be smoothed
                get_event_storage().put_row(counts, smoothing_hint=False, cur_iter=record.iter)
        means, failures = exchange_rows(rows, self.exchange_period, failure)
        for record, mean in zip(stored, means, strict=True):
            if not math.isfinite(mean.values["total_loss"]) and self._finite.policy != "ignore":
                # a value that is not finite would spoil every average
                finite = {name: value for name, value in mean.values.items() if math.isfinite(value)}
                mean = mean._replace(values=finite)
            if not record.written:
                put_row(mean, record.data_time)
            elif others := {name: value for name, value in mean.values.items() if name not in record.written}:
                get_event_storage().put_row(others, cur_iter=record.iter)
        if any(failures):
            self._has_failed = True
            raise_failure(failures)

    def _is_stored(self, record: StepRecord) -> bool:
        return (record.iter + 1) % self.gather_period == 0


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
    every = torch.empty(comm.get_world_size(), *block.shape, dtype=torch.float64)
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
