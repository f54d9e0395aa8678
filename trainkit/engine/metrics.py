"""The way of a step's losses from the device to the storage, and from every rank to all."""

import math
import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.engine.finite import raise_failure
from trainkit.utils import comm
from trainkit.utils.events import get_event_storage
from trainkit.utils.losses import Losses


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

    def __init__(self, losses: Losses, data_time: float, iter: int, extra: Mapping[str, Tensor] | None = None) -> None:
        """
        Args:
            losses: detached.
            data_time: in seconds.
            extra: name -> what else is stored, shape ``[]``, detached; no loss, so it may be anything.

        Raises:
            ValueError: the model calls a loss by a name of ``extra``.
        """
        extra = extra or {}
        if not extra.keys().isdisjoint(losses.values):
            taken = sorted(losses.values.keys() & extra.keys())
            raise ValueError(f"the trainer stores {taken} itself; give the model's entry another name")
        self.data_time, self.iter = data_time, iter
        self._names, self._extra_names = losses.names(), list(extra)
        self._arrived: torch.cuda.Event | None = None
        # a single loss is the total
        tensors = [losses.total, *(losses.values.values() if len(self._names) > 1 else ()), *extra.values()]
        if not tensors[0].is_cuda:
            self._values = [tensor.item() for tensor in tensors]
            return
        device = tensors[0].device  # an entry that is only logged may lie elsewhere
        packed = torch.stack([tensor.to(device, torch.float64, non_blocking=True) for tensor in tensors])
        self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        self._host.copy_(packed, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(device))  # not that of the current device

    def is_unremarkable(self, flag: str) -> bool:
        """Whether the total is finite and the ``flag`` among ``extra`` is 0; False if that takes waiting."""
        if self._arrived is not None or not math.isfinite(self._values[0]):
            return False
        return flag not in self._extra_names or self._values[len(self._names) + self._extra_names.index(flag)] == 0

    def read(self) -> tuple[dict[str, float], dict[str, float]]:
        """(the losses by name, the total first; ``extra``); waits until they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._values = self._host.tolist()
        values = iter(self._values)
        return dict(zip(self._names, values)), dict(zip(self._extra_names, values))  # noqa: B905


_AS_THEY_ARE = frozenset({"skipped_updates", "[metric]grad_scaler"})  # the median of a count tells nobody anything


def put_metrics(
    means: Mapping[str, float], data_time: float, max_data_time: float, iter: int, prefix: str = ""
) -> None:
    """Put what `reduce_over_ranks` gave, and the rank's own ``data_time``, into the open storage."""
    storage = get_event_storage()
    row = {"rank_data_time": data_time, "data_time": max_data_time}
    as_they_are: dict[str, float] = {}
    for name, value in means.items():
        (as_they_are if name in _AS_THEY_ARE else row)[prefix + name] = value
    storage.put_row(row, cur_iter=iter)
    if as_they_are:
        storage.put_row(as_they_are, smoothing_hint=False, cur_iter=iter)


# ---------------------------------------------------------------------- over ranks

_CAPACITY = 64  # losses that fit into one exchange


def reduce_over_ranks(
    values: Mapping[str, float], data_time: float, failure: str | None = None
) -> tuple[dict[str, float], float]:
    """(name -> mean over the ranks that have it, longest ``data_time``), on every rank; one small exchange.

    Ranks may pass different names: all of them notice it in the first exchange and make a second one.

    Raises:
        FloatingPointError: on every rank, if one of them passes a ``failure``.
    """
    if comm.get_world_size() == 1:
        raise_failure([failure])
        return dict(values), data_time
    group = metrics_group()
    names = zlib.crc32("\n".join(values).encode())
    mine = torch.zeros(_CAPACITY + 3, dtype=torch.float64)
    mine[0], mine[1], mine[2] = names, data_time, failure is not None
    fits = len(values) <= _CAPACITY
    if fits:
        mine[3 : len(values) + 3] = torch.tensor(list(values.values()), dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(comm.get_world_size())]
    dist.all_gather(every, mine, group=group)  # the same length on every rank: gloo would add up garbage otherwise
    table = torch.stack(every)
    max_data_time = table[:, 1].max().item()
    if table[:, 2].any():
        raise_failure(comm.all_gather(failure, group=group))
    if fits and bool((table[:, 0] == names).all()):
        return dict(zip(values, table[:, 3 : len(values) + 3].mean(0).tolist(), strict=True)), max_data_time
    by_rank = comm.all_gather(dict(values), group=group)
    together = {name: [d[name] for d in by_rank if name in d] for d in by_rank for name in d}
    return {name: sum(found) / len(found) for name, found in together.items()}, max_data_time


def metrics_group() -> "dist.ProcessGroup | None":
    """A group of our own: a worker thread may use it while the loop uses the others; see `comm.side_group`."""
    return comm.side_group("metrics")
