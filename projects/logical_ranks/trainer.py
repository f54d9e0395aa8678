"""Steps that give the same bits on any number of processes; SOLVER.LOGICAL_RANKS switches them on."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from operator import add, itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from trainkit.projects.logical_ranks.loader import own_ranks

from trainkit.config import CfgNode, ConfigError
from trainkit.data.seeding import seed_globals, splitmix64
from trainkit.engine.amp import AMPTrainer
from trainkit.engine.defaults.build import TRAINER_REGISTRY, make_step_trainer
from trainkit.engine.losses import Losses
from trainkit.engine.parallel import without_gradient_sync
from trainkit.engine.step import SimpleTrainer
from trainkit.utils import comm
from trainkit.utils.comm import tree_sum
from trainkit.utils.device import unwrap_model

logger = logging.getLogger(__name__)

_SEED_KEY = 3  # the data use keys 0 to 2, so random numbers of steps are independent of theirs
_AFTER_STEP, _AT_SAVE_POINT, _OF_BATCHES = 0, 1, 2

_Grads = list[Tensor | None]


class LogicalTrainer(SimpleTrainer):
    """`SimpleTrainer` with the same bits on 1, 2, 4, ... processes, and when that number changes in a resumed run.

    A process computes its logical ranks one after the other. Random numbers are a function of the loader's seed, the
    iteration, the logical rank and the micro-batch. Gradients, losses and the statistics of normalization layers are
    added up in one binary tree. Each logical rank normalizes its own samples, from the statistics before the step.
    The number of logical ranks is `comm.get_data_world_size`.
    """

    own_keys = ()  # nothing differs between processes

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """The loader must be a `LogicalLoader`; ``accumulation_steps`` is that of a logical rank.

        Raises ConfigError: the model has sparse gradients or a `SyncBatchNorm`.
        """
        super().__init__(*args, **kwargs)
        self._num = comm.get_data_world_size()
        self._own = own_ranks(self._num)
        self._names: Any = None  # the names of the losses
        self._tree = _Tree(self.model, self._num)
        self.accumulation_steps *= len(self._own)
        self._steps = self.accumulation_steps
        self._fix_epochs()  # an iteration draws the micro-batches of all own logical ranks
        if self.data_size.batch is not None:  # which has counted them, and all logical ranks
            batch = self.data_size.batch // len(self._own)
            self.data_size = replace(self.data_size, batch=batch)
        threads = torch.get_num_threads()
        logger.info(
            "%d logical ranks; other numbers of threads than %d may round differently",
            self._num,
            threads,
        )

    def share_run(self, owner: Any) -> None:
        super().share_run(owner)
        owner.own_keys = owner.rank_keys = ()

    def start_run(self) -> None:
        super().start_run()
        if (found := getattr(self.data_loader, "logical_ranks", 0)) != self._num:
            raise ConfigError(
                f"the training loader has {found} logical ranks, the trainer {self._num}"
            )

    def compute_gradients(self) -> Losses:
        if self.accumulation_steps != self._steps:
            raise ConfigError(
                "with SOLVER.LOGICAL_RANKS the number of micro-batches cannot change during a run"
            )
        found, steps = list[Losses](), self._steps // len(self._own)
        for number in range(self.accumulation_steps):
            # the first one of a run comes after a pass without effect, see settle_buckets
            batch = self.draw()
            place, step = divmod(number, steps)
            if number == 0:
                self._tree.start()
            elif step == 0:
                self._tree.push()
            self._seed_for(_OF_BATCHES + self._own[place] * steps + step)
            # DDP exchanges gradients with the last one
            is_last = number == self.accumulation_steps - 1
            with nullcontext() if is_last else without_gradient_sync(self.model):
                losses = self.compute_losses(batch)
                self.backward(losses.total / (self._num * steps))
            found.append(losses := losses.detach())  # frees the graph before the next forward pass
        self._tree.finish()
        self._seed_for(_AFTER_STEP)
        return self._mean(found)

    def _mean(self, found: Sequence[Losses]) -> Losses:
        """The means over the logical ranks of this process; `exchange_rows` then averages over all processes."""
        names = [([*losses], losses.trained) for losses in found]
        self._names = self._names or comm.all_gather(names[0])[0]
        if any(other != self._names for other in names):
            raise ValueError(
                f"with SOLVER.LOGICAL_RANKS each batch must give the same losses; got {names}"
            )
        rows = [
            torch.stack(
                [_wide(value).to(losses.total.device) for value in (losses.total, *losses.values())]
            )
            for losses in found
        ]
        by_rank = torch.stack(rows).view(len(self._own), -1, len(rows[0]))
        # with torch.sum, the order of additions would depend on the number of logical ranks
        means = (reduce(add, by_rank.unbind(1)) / by_rank.shape[1]).unbind()
        _, ascending = zip(
            *sorted(zip(self._own, means, strict=True), key=itemgetter(0)), strict=True
        )
        total, *values = (tree_sum(torch.stack(ascending)) / len(self._own)).unbind()
        by_name = dict(zip(self._names[0], values, strict=True))
        return Losses(by_name, self._names[1], [losses.outputs for losses in found], total=total)

    def end_step(self) -> None:
        super().end_step()
        # hooks may have drawn different numbers on different processes
        self._seed_for(_AT_SAVE_POINT)

    def _seed_for(self, number: int) -> None:
        seed = splitmix64(
            splitmix64(splitmix64(self.data_loader.seed, _SEED_KEY), self.iter), number
        )
        seed_globals(seed)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed(seed)


class LogicalAMPTrainer(LogicalTrainer, AMPTrainer):
    """`AMPTrainer` with logical ranks; see `LogicalTrainer`."""


@TRAINER_REGISTRY.register()
def logical_trainer(
    cfg: CfgNode, model: nn.Module, data_loader: Iterable[Any], optimizer: torch.optim.Optimizer
) -> SimpleTrainer:
    return make_step_trainer(cfg, model, data_loader, optimizer, LogicalTrainer, LogicalAMPTrainer)


class _Tree:
    """Adds up gradients and statistics over the logical ranks, in the order of `own_ranks`.

    The sums of a process are kept like the digits of a binary counter: a sum over 1, over 2, over 4, ... logical ranks.
    After its last logical rank a process adds them up. Then the processes exchange their sums.
    """

    def __init__(self, model: nn.Module, logical_ranks: int) -> None:
        modules = dict(unwrap_model(model).named_modules())
        wrong = [
            name
            for name, m in modules.items()
            if isinstance(m, nn.SyncBatchNorm) or getattr(m, "sparse", False)
        ]
        if wrong:
            raise ConfigError(
                f"SOLVER.LOGICAL_RANKS excludes SyncBatchNorm and sparse gradients, as in {', '.join(wrong)}"
            )
        self._logical_ranks = logical_ranks
        self._parameters = [*model.parameters()]
        self._places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        # in the forward pass only these modules may write buffers
        norms = [module for module in modules.values() if isinstance(module, _NormBase)]
        self._statistics = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self._others_of = [module for module in modules.values() if module not in norms]
        self._floating = [buffer for buffer in self._statistics if buffer.is_floating_point()]
        # (number of logical ranks, gradients, statistics)
        self._sums: list[tuple[int, _Grads, Tensor]] = []
        self._under_way: list[tuple[_Exchange, torch.futures.Future[Tensor]]] = []
        self._is_ddp = isinstance(model, DistributedDataParallel)
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, self._exchange_bucket)

    def start(self) -> None:
        """Call before the first logical rank."""
        self._sums, self._under_way = [], []
        for parameter in self._parameters:
            parameter.grad = None
        self._former = [buffer.clone() for buffer in self._statistics]
        self._others = self._versions()

    @torch.no_grad()
    def push(self) -> None:
        """Call after each logical rank except the last: keep its results, and restore the statistics of the norms."""
        num, packed, grads = 1, self._packed(), [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        for buffer, former in zip(self._statistics, self._former, strict=True):
            buffer.copy_(former)
        while self._sums and self._sums[-1][0] == num:
            num, former_grads, former_packed = self._sums.pop()
            num, grads, packed = 2 * num, _add(former_grads, grads), former_packed + packed
        self._sums.append((num, grads, packed))

    @torch.no_grad()
    def finish(self) -> None:
        """Call after the last logical rank: gradients become the sums over all ranks, and statistics the means.

        Raises ValueError: the model has written other buffers.
        """
        if self._versions() != self._others:
            raise ValueError(
                "SOLVER.LOGICAL_RANKS: of all buffers only the statistics of normalization layers may change"
            )
        packed, grads = self._packed(), [parameter.grad for parameter in self._parameters]
        for _, sums, more in reversed(self._sums):
            packed = more + packed
            grads = grads if self._is_ddp else _add(sums, grads)
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = grad
        if self._floating and comm.get_world_size() > 1:
            exchange = _Exchange(packed)
            exchange.go_on()
            packed = exchange.result()
        parts = packed.split([buffer.numel() for buffer in self._floating])
        for buffer, part in zip(self._floating, parts, strict=True):
            buffer.copy_(part.view_as(buffer))

    def _packed(self) -> Tensor:
        parts = [_wide(buffer).flatten() for buffer in self._floating]
        return torch.cat(parts) / self._logical_ranks if parts else torch.zeros(0)

    def _versions(self) -> list[tuple[int, int]]:
        """They change if the model writes or replaces a buffer that is no statistic."""
        buffers = [buffer for module in self._others_of for buffer in module.buffers(recurse=False)]
        return [(id(buffer), buffer._version) for buffer in buffers]

    def _exchange_bucket(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP calls it with each bucket, in one order on all processes, during the last backward pass of a step."""
        parameters, flat = bucket.parameters(), bucket.buffer()
        parts = zip(flat.split([each.numel() for each in parameters]), parameters, strict=True)
        # DDP's layout
        grads: _Grads = [part.as_strided(each.shape, each.stride()) for part, each in parts]
        for _, sums, _ in reversed(self._sums):
            _add(grads, [sums[self._places[id(each)]] for each in parameters])
        total = torch.futures.Future[Tensor](
            devices=None if flat.device.type == "cpu" else [flat.device]
        )
        self._under_way.append((_Exchange(flat), total))
        if bucket.is_last():
            for exchange, _ in self._under_way:
                exchange.go_on()
            for exchange, future in self._under_way:
                future.set_result(exchange.result())
            self._under_way = []
        return total


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.float32 if value.device.type == "mps" else torch.float64)


def _add(into: _Grads, more: _Grads) -> _Grads:
    """Add ``more`` to ``into``, in its memory."""
    pairs: Any = [*zip(into, more, strict=True)]
    if both := [(a, b) for a, b in pairs if a is not None and b is not None]:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in pairs]


class _Exchange:
    """The sum of a vector over the processes, in the order of the tree. Each process adds up one part for all."""

    def __init__(self, flat: Tensor) -> None:
        self._size, self._world_size = flat.numel(), comm.get_world_size()
        missing = -self._size % self._world_size
        self._sent = nn.functional.pad(flat, (0, missing)) if missing else flat
        self._received = torch.empty_like(self._sent)
        self._work: Any = dist.all_to_all_single(self._received, self._sent, async_op=True)

    def go_on(self) -> None:
        self._work.wait()
        self._part = tree_sum(self._received.view(self._world_size, -1))
        self._work = dist.all_gather_single(self._received, self._part, async_op=True)

    def result(self) -> Tensor:
        self._work.wait()
        return self._received[: self._size]
