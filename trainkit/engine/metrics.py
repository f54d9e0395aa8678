"""The way of a step's losses from the device to the storage, and from every rank to all."""

import math
import weakref
import zlib
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.engine.finite import raise_failure
from trainkit.utils import comm
from trainkit.utils.events import get_event_storage
from trainkit.utils.losses import Losses
from trainkit.utils.shared_rows import SharedRows


def mean_losses(losses: Sequence[Losses]) -> Losses:
    """The mean of each entry over micro-batches.

    Where one has no such entry, a loss counts as 0, as in what is minimized, and what is only logged does not count.
    """
    if len(losses) == 1:
        return losses[0]
    trained = list(dict.fromkeys(name for part in losses for name in part.trained))
    means = {}
    for name in dict.fromkeys(name for part in losses for name in part.values):
        values = torch.stack([part.values[name] for part in losses if name in part.values])
        means[name] = values.sum() / (len(losses) if name in trained else len(values))
    return Losses.of(means, trained)


class StepRecord:
    """The scalars of one iteration on their way to the host; on CUDA as one small tensor that nobody waits for yet."""

    def __init__(
        self,
        losses: Losses,
        data_time: float,
        iter: int,
        extra: Mapping[str, Tensor] | None = None,
        flag: Tensor | None = None,
    ) -> None:
        """
        Args:
            data_time: in seconds.
            extra: name -> what else is stored, shape ``[]``, detached; no loss, so it may be anything.
            flag: shape ``[]``, not 0 if the update is not finite.

        Raises:
            ValueError: the model calls a loss by a name of ``extra``.
        """
        self.data_time, self.iter = data_time, iter
        tensors = {"total_loss": losses.total}
        if len(losses.values) > 1:  # a single loss is the total
            tensors |= losses.values
        self.num_losses = len(tensors)
        if extra:
            tensors |= extra
            if len(tensors) < self.num_losses + len(extra):
                taken = sorted(losses.values.keys() & extra.keys())
                raise ValueError(f"the trainer stores {taken} itself; give the model's entry another name")
        self._arrived: torch.cuda.Event | None = None
        if not losses.total.is_cuda:
            self._flagged = flag is not None and flag.item() != 0
            self._values = {name: tensor.item() for name, tensor in tensors.items()}
            return
        device = losses.total.device  # an entry that is only logged may lie elsewhere
        scalars = [*tensors.values(), *([] if flag is None else [flag])]
        with torch.no_grad():
            packed = torch.stack([tensor.to(device, torch.float64, non_blocking=True) for tensor in scalars])
        self._names = list(tensors)
        self._host = _pinned_rows(len(scalars)).pop()
        self._host.copy_(packed, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(device))  # not that of the current device

    def is_under_way(self) -> bool:
        """Whether reading it may take waiting."""
        return self._arrived is not None

    def is_unremarkable(self) -> bool:
        """Whether the total is finite and the flag 0; False if that takes waiting."""
        return self._arrived is None and not self._flagged and math.isfinite(self._values["total_loss"])

    def read(self) -> tuple[dict[str, float], bool]:
        """(``num_losses`` losses by name, the total first, and ``extra``; the flag); waits until they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
            values = self._host.tolist()
            _rows_by_width()[len(values)].append(self._host)
            self._values, flag = dict(zip(self._names, values)), values[len(self._names) :]  # noqa: B905
            self._flagged, self._arrived = any(flag), None
        return self._values, self._flagged


@cache
def _rows_by_width() -> dict[int, list[Tensor]]:
    return {}


def _pinned_rows(width: int) -> list[Tensor]:
    """Pinned memory for records, at least one of them: float64, shape ``[width]`` each.

    It is taken many rows at a time, since that may wait for the device. The worker gives back what it has read.
    """
    rows = _rows_by_width().setdefault(width, [])
    if not rows:
        rows.extend(torch.empty((1024, width), dtype=torch.float64, pin_memory=True).unbind())
    return rows


# by the trainer, or by default hooks and writers
STORED_BESIDE_LOSSES = frozenset(
    {"data_time", "rank_data_time", "skipped_updates"}
    | {"iteration", "epoch", "lr", "time", "eta_seconds", "epoch_time"}
)
_AS_THEY_ARE = frozenset({"skipped_updates", "[metric]grad_scaler"})  # the median of a count tells nobody anything


def put_metrics(
    means: Mapping[str, float], data_time: float, max_data_time: float, iter: int, prefix: str = ""
) -> None:
    """Put what `reduce_over_ranks` gave, and the rank's own ``data_time``, into the open storage."""
    storage = get_event_storage()
    if not _AS_THEY_ARE.isdisjoint(means):
        counts = {prefix + name: means[name] for name in means if name in _AS_THEY_ARE}
        storage.put_row(counts, smoothing_hint=False, cur_iter=iter)
        means = {name: mean for name, mean in means.items() if name not in _AS_THEY_ARE}
    if prefix:
        means = {prefix + name: mean for name, mean in means.items()}
    storage.put_row({"rank_data_time": data_time, "data_time": max_data_time, **means}, cur_iter=iter)


# ---------------------------------------------------------------------- over ranks

_CAPACITY = 64  # losses that fit into one exchange
_WIDTH = 3 + _CAPACITY

# by the group of the metrics; None: over Gloo
_shared_rows: "weakref.WeakKeyDictionary[dist.ProcessGroup, SharedRows | None]" = weakref.WeakKeyDictionary()


def reduce_over_ranks(
    values: Mapping[str, float], data_time: float, failure: str | None = None
) -> tuple[dict[str, float], float]:
    """(name -> mean over the ranks that have it, longest ``data_time``), on every rank; one small exchange.

    Ranks may pass different names: all of them notice it in the first exchange and make a second one.

    Raises:
        FloatingPointError: on every rank, if one of them passes a ``failure``.
    """
    if comm.get_world_size() == 1:
        if failure is not None:
            raise_failure([failure])
        return dict(values), data_time
    prepare_exchange()
    group = comm.side_group("metrics")
    assert group is not None
    names = zlib.crc32("\n".join(values).encode("utf-8", "backslashreplace"))
    # in numpy: on so few numbers an operation of torch takes ten times as long
    mine = np.zeros(_WIDTH)  # the same on every rank: Gloo would mix up garbage otherwise
    mine[:3] = names, data_time, failure is not None
    fits = len(values) <= _CAPACITY
    if fits:
        mine[3 : len(values) + 3] = list(values.values())
    table = _all_gather(mine, group)
    max_data_time = float(table[:, 1].max())
    if table[:, 2].any():
        raise_failure(comm.all_gather(failure, group=group))
    if fits and (table[:, 0] == names).all():
        return dict(zip(values, table[:, 3 : len(values) + 3].mean(0).tolist(), strict=True)), max_data_time
    by_rank = comm.all_gather(dict(values), group=group)
    together = {name: [d[name] for d in by_rank if name in d] for d in by_rank for name in d}
    return {name: sum(found) / len(found) for name, found in together.items()}, max_data_time


def prepare_exchange() -> bool:
    """Whether metrics go over a network, and not through memory that the processes of one machine share.

    The first call makes what that takes, a process group of our own included, so that a worker thread may exchange them
    while the loop uses the others: on all ranks in the thread of the loop, see `comm.side_group`.
    """
    group = comm.side_group("metrics")
    if group is None:
        return False
    if group not in _shared_rows:
        _shared_rows[group] = SharedRows.among_all(_WIDTH)
    return _shared_rows[group] is None


def _all_gather(row: np.ndarray, group: "dist.ProcessGroup") -> np.ndarray:
    shared = _shared_rows[group]
    if shared is not None:
        return shared.all_gather(row)
    every = torch.empty(comm.get_world_size(), len(row), dtype=torch.float64)
    dist.all_gather(list(every.unbind()), torch.from_numpy(row), group=group)
    return every.numpy()
