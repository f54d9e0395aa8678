"""Steps that give the same bits on any number of processes; SOLVER.LOGICAL_RANKS switches them on."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from operator import add
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
_AFTER_STEP = 0
_AT_SAVE_POINT = 1
_OF_BATCHES = 2

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
        text = "%d logical ranks; other numbers of threads than %d may round differently"
        logger.info(text, self._num, torch.get_num_threads())

    def share_run(self, owner: Any) -> None:
        super().share_run(owner)
        owner.own_keys = ()
        owner.rank_keys = ()

    def start_run(self) -> None:
        super().start_run()
        found = getattr(self.data_loader, "logical_ranks", 0)
        if found != self._num:
            raise ConfigError(
                f"the training loader has {found} logical ranks, the trainer {self._num}"
            )

    def compute_gradients(self) -> Losses:
        if self.accumulation_steps != self._steps:
            raise ConfigError(
                "with SOLVER.LOGICAL_RANKS the number of micro-batches cannot change during a run"
            )
        found: list[Losses] = []
        steps = self._steps // len(self._own)  # micro-batches of a logical rank
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
            losses = losses.detach()  # frees the graph before the next forward pass
            found.append(losses)
        self._tree.finish()
        self._seed_for(_AFTER_STEP)
        return self._mean(found)

    def _mean(self, found: Sequence[Losses]) -> Losses:
        """The means over the logical ranks of this process; `exchange_rows` then averages over all processes."""
        names = [([*losses], losses.trained) for losses in found]
        if self._names is None:
            self._names = comm.all_gather(names[0])[0]
        if any(other != self._names for other in names):
            raise ValueError(
                f"with SOLVER.LOGICAL_RANKS each batch must give the same losses; got {names}"
            )
        rows = torch.stack([_row_of(losses) for losses in found])
        by_rank = rows.view(
            len(self._own), -1, rows.shape[1]
        )  # [logical ranks, micro-batches, values]
        # with torch.sum, the order of additions would depend on the number of logical ranks
        sums = reduce(add, by_rank.unbind(1))
        means = sums / by_rank.shape[1]
        in_order = [means[place] for place in _ascending(self._own)]
        of_process = tree_sum(torch.stack(in_order)) / len(self._own)
        total, *values = of_process.unbind()
        loss_names, trained = self._names
        by_name = dict(zip(loss_names, values, strict=True))
        return Losses(by_name, trained, [losses.outputs for losses in found], total=total)

    def end_step(self) -> None:
        super().end_step()
        # hooks may have drawn different numbers on different processes
        self._seed_for(_AT_SAVE_POINT)

    def _seed_for(self, number: int) -> None:
        seed = splitmix64(self.data_loader.seed, _SEED_KEY)
        seed = splitmix64(seed, self.iter)
        seed = splitmix64(seed, number)
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
        wrong = []
        for name, module in modules.items():
            if isinstance(module, nn.SyncBatchNorm) or getattr(module, "sparse", False):
                wrong.append(name)
        if wrong:
            raise ConfigError(
                "SOLVER.LOGICAL_RANKS excludes SyncBatchNorm and sparse gradients, as in "
                f"{', '.join(wrong)}"
            )
        self._logical_ranks = logical_ranks
        self._parameters = [*model.parameters()]
        self._places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        # in the forward pass only the norms may write buffers
        self._statistics: list[Tensor] = []
        self._other_modules: list[nn.Module] = []
        for module in modules.values():
            if isinstance(module, _NormBase):
                self._statistics += module.buffers(recurse=False)
            else:
                self._other_modules.append(module)
        self._floating = [buffer for buffer in self._statistics if buffer.is_floating_point()]
        # (number of logical ranks, gradients, statistics)
        self._sums: list[tuple[int, _Grads, Tensor]] = []
        self._under_way: list[tuple[_Exchange, torch.futures.Future[Tensor]]] = []
        self._is_ddp = isinstance(model, DistributedDataParallel)
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, self._exchange_bucket)

    def start(self) -> None:
        """Call before the first logical rank."""
        self._sums = []
        self._under_way = []
        for parameter in self._parameters:
            parameter.grad = None
        self._former = [buffer.clone() for buffer in self._statistics]
        self._others = self._versions()

    @torch.no_grad()
    def push(self) -> None:
        """Call after each logical rank except the last: keep its results, and restore the statistics of the norms."""
        packed = self._packed()
        grads = self._take_gradients()
        for buffer, former in zip(self._statistics, self._former, strict=True):
            buffer.copy_(former)
        # as digits are carried: two sums over as many logical ranks become one
        num = 1
        while self._sums and self._sums[-1][0] == num:
            _, former_grads, former_packed = self._sums.pop()
            grads = _add(former_grads, grads)
            packed = former_packed + packed
            num *= 2
        self._sums.append((num, grads, packed))

    def _take_gradients(self) -> _Grads:
        """The gradients; after this the parameters have none."""
        grads = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return grads

    @torch.no_grad()
    def finish(self) -> None:
        """Call after the last logical rank: gradients become the sums over all ranks, and statistics the means.

        Raises ValueError: the model has written other buffers.
        """
        if self._versions() != self._others:
            raise ValueError(
                "SOLVER.LOGICAL_RANKS: of all buffers only the statistics of normalization "
                "layers may change"
            )
        packed = self._packed()
        grads = [parameter.grad for parameter in self._parameters]
        for _, former_grads, former_packed in reversed(self._sums):
            packed = former_packed + packed
            if not self._is_ddp:  # DDP calls _exchange_bucket
                grads = _add(former_grads, grads)
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
        if not self._floating:
            return torch.zeros(0)
        parts = [_wide(buffer).flatten() for buffer in self._floating]
        return torch.cat(parts) / self._logical_ranks

    def _versions(self) -> list[tuple[int, int]]:
        """They change if the model writes or replaces a buffer that is no statistic."""
        versions = []
        for module in self._other_modules:
            for buffer in module.buffers(recurse=False):
                versions.append((id(buffer), buffer._version))
        return versions

    def _exchange_bucket(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP calls it with each bucket, in one order on all processes, during the last backward pass of a step."""
        flat = bucket.buffer()
        parameters = bucket.parameters()
        parts = flat.split([parameter.numel() for parameter in parameters])
        grads: _Grads = []
        for part, parameter in zip(parts, parameters, strict=True):
            # DDP's layout
            grads.append(part.as_strided(parameter.shape, parameter.stride()))
        places = [self._places[id(parameter)] for parameter in parameters]
        for _, former_grads, _ in reversed(self._sums):
            _add(grads, [former_grads[place] for place in places])
        devices: Any = None if flat.device.type == "cpu" else [flat.device]
        total = torch.futures.Future[Tensor](devices=devices)
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


def _row_of(losses: Losses) -> Tensor:
    """The total, and each loss, in one tensor on the device of the total."""
    device = losses.total.device
    values = [losses.total, *losses.values()]
    return torch.stack([_wide(value).to(device) for value in values])


def _ascending(ranks: Sequence[int]) -> list[int]:
    """The places of the ranks in the order of their numbers."""
    return sorted(range(len(ranks)), key=ranks.__getitem__)


def _add(into: _Grads, more: _Grads) -> _Grads:
    """Add ``more`` to ``into``, in its memory."""
    sums: _Grads = []
    targets: list[Tensor] = []
    added: list[Tensor] = []
    for own, other in zip(into, more, strict=True):
        if own is not None and other is not None:
            targets.append(own)
            added.append(other)
        sums.append(other if own is None else own)
    if targets:
        torch._foreach_add_(targets, added)
    return sums


class _Exchange:
    """The sum of a vector over the processes, in the order of the tree. Each process adds up one part for all."""

    def __init__(self, flat: Tensor) -> None:
        self._size = flat.numel()
        self._world_size = comm.get_world_size()
        missing = -self._size % self._world_size
        self._sent = flat
        if missing:
            self._sent = nn.functional.pad(flat, (0, missing))
        self._received = torch.empty_like(self._sent)
        self._work: Any = dist.all_to_all_single(self._received, self._sent, async_op=True)

    def go_on(self) -> None:
        self._work.wait()
        self._part = tree_sum(self._received.view(self._world_size, -1))
        self._work = dist.all_gather_single(self._received, self._part, async_op=True)

    def result(self) -> Tensor:
        self._work.wait()
        return self._received[: self._size]
