"""Trainers whose iteration is one update of one model by one optimizer."""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from trainkit.data.build import iters_per_epoch
from trainkit.data.loader import ResumableLoader, resume_obstacle
from trainkit.engine.finite import (
    FiniteJudge,
    GradientCheck,
    NonFinitePolicy,
    describe_failure,
    join_flags,
    non_finite_names,
    prepare_to_skip,
    raise_failure,
    step_unless,
)
from trainkit.engine.loop import TrainerBase
from trainkit.engine.metrics import (
    STORED_BESIDE_LOSSES,
    MetricPath,
    Row,
    StepRecord,
    exchange_rows,
    mean_losses,
    put_row,
)
from trainkit.engine.periods import check_period
from trainkit.solver.hyper_parameters import check_saved_groups, describe_changes, hyper_parameters
from trainkit.utils import comm
from trainkit.utils.device import Prefetcher, device_of, first_tensor
from trainkit.utils.events import EventStorage, get_event_storage, has_event_storage
from trainkit.utils.losses import Losses, parse_losses
from trainkit.utils.model import is_part_of
from trainkit.utils.rng import preserve_rng_state
from trainkit.utils.sharding import is_sharded_model, shard_optimizer_state, without_reduction
from trainkit.utils.waiting import Abandoned, next_batch

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def check_exchange(
    trainer: Any, *, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """
    Raises:
        RuntimeError: the trainer runs, and this is another model or optimizer than its own.
    """
    if trainer.status != "running":
        return
    if model is not None and not is_part_of(model, trainer.model):
        raise RuntimeError(
            "trainer.model cannot become another model during a run: the optimizer, hooks and the checkpointer would "
            "go on with the old one. Change that one in place (load_state_dict), or build the other one before "
            "training (build_model of DefaultTrainer)"
        )
    if optimizer is not None and optimizer.param_groups is not trainer.optimizer.param_groups:
        raise RuntimeError(
            "trainer.optimizer cannot become another optimizer during a run: the schedule and hooks would go on with "
            "the old one. Change that one in place (param_groups, load_state_dict), or build the other one before "
            "training (build_optimizer of DefaultTrainer)"
        )


class SimpleTrainer(TrainerBase):
    """One model, one loss (or a sum of losses), one optimizer, one data source.

    Whoever needs more (two optimizers, a GAN) subclasses `TrainerBase` with its own ``run_step``.

    ``batch`` and ``losses`` can be read in ``after_backward``, and in ``after_step`` above the save point.

    Attributes:
        metrics: the way of the losses into the storage.
    """

    own_keys = (*TrainerBase.own_keys, "data")

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Any],
        optimizer: torch.optim.Optimizer,
        gather_metric_period: int = 1,
        zero_grad_before_forward: bool = False,
        async_write_metrics: bool = False,
        *,
        accumulation_steps: int = 1,
        clip_gradients: Callable[[Iterable[Tensor]], Tensor | None] | None = None,
        non_finite: NonFinitePolicy = "raise",
        max_non_finite_in_row: int = 25,
        exchange_period: int = 1,
    ) -> None:
        """The model is set to train mode here, once; whoever changes the mode later puts it back.

        Args:
            model: takes what ``data_loader`` yields and returns a loss, or a dict of losses by name. Those that
                require grad are added up and minimized, the others are only logged.
            data_loader: an iterable; when it ends, it is iterated again.
            gather_metric_period: average the metrics over ranks, and store them, every so many iterations.
            zero_grad_before_forward: zero the gradients before the forward pass instead of behind it, which needs
                less memory where a model's forward is large.
            async_write_metrics: read the losses from CUDA, and exchange them with the other ranks, in a worker thread.
                An error there, a loss that is not finite included, ends the run one log period later at most. On a CPU
                there is nothing to wait for, and no worker.
            accumulation_steps: micro-batches per iteration; equals one batch of so many times the size for losses
                that are means over the batch.
            clip_gradients: called with the parameters between ``after_backward`` and the update, such as
                `trainkit.solver.GradientClipper`; what it returns, shape ``[]``, is stored as ``grad_norm``.
            non_finite: what to do if the total loss, or a gradient behind ``after_backward``, is not finite. "raise"
                ends the run. "skip" leaves the update out on all ranks, with what the forward pass has done to the
                model's buffers; ``skipped_updates`` in the storage is their number so far. "ignore" looks at nothing.
            max_non_finite_in_row: so many skipped updates in a row end the run, also those that a gradient scaler
                skips under "raise". At 25, a scale of 2**16 is down to 2**-9.
            exchange_period: with several ranks, exchange metrics once per so many iterations. Until then they are in
                no storage, and a failure of one rank is raised on none.

        Raises:
            ConfigError: fused SGD with dampening, which cannot skip its first update, under "skip".
            ValueError: a period is less than 1; ``non_finite`` is none of the three.
        """
        super().__init__()
        model.train()
        self.non_finite = non_finite
        self.model = model
        self.data_loader = data_loader
        self.gather_metric_period = check_period("gather_metric_period", gather_metric_period, minimum=1)
        self.zero_grad_before_forward = zero_grad_before_forward
        self.async_write_metrics = async_write_metrics
        self.accumulation_steps = check_period("accumulation_steps", accumulation_steps, minimum=1)
        self.clip_gradients = clip_gradients
        check_period("max_non_finite_in_row", max_non_finite_in_row, minimum=1)
        self._judge = FiniteJudge(non_finite, max_non_finite_in_row)
        self.metrics = MetricPath(self._judge, gather_metric_period, exchange_period, async_write_metrics)
        self._gradient_check = GradientCheck()
        self._flags: dict[torch.device, Tensor] = {}
        self._flag: Tensor | None = None  # on the device, 1 in the iterations whose gradients are not finite
        self._former_buffers: dict[str, Tensor] = {}  # what a step that is skipped puts back
        # of this iteration, until the save point
        self._batch: Any = None
        self._losses: Losses | None = None
        self._prefetcher = Prefetcher()
        self._sample: tuple[nn.Module | None, Tensor | None] = (None, None)  # the model and a tensor of it
        self._losses_described = False
        self._has_stepped = False
        self.optimizer = optimizer
        if accumulation_steps > 1 and any(isinstance(module, _BatchNorm) for module in model.modules()):
            logger.warning(
                "The model has batch norm, which normalizes each micro-batch by itself, so %d of them do not equal one "
                "batch of %d times the size; group norm or layer norm would",
                accumulation_steps,
                accumulation_steps,
            )

    def run_step(self) -> None:
        """Fetch, zero_grad, forward, backward, after_backward, clip, metrics, update."""
        if not self.model.training:
            raise RuntimeError(
                "the model is in eval mode; whoever called model.eval() must call model.train() afterwards"
            )
        try:
            batches, data_time = self._fetch()
            self._losses = losses = self.compute_gradients(batches)
            self.after_backward()
            extra = self.judge_gradients(losses)
            # before the update: what is not finite must not reach the weights
            record = StepRecord(losses, data_time, self.iter, extra, self._flag)
            self.metrics.add(record, is_last=self.iter + 1 == self.max_iter)
            self.update()
        except RuntimeError as error:
            if isinstance(self.data_loader, ResumableLoader):
                self.data_loader.explain(error)
            raise

    @property
    def batch(self) -> Any:
        """What the loader gave in this iteration, on the model's device; a list if ``accumulation_steps`` > 1.

        Raises:
            RuntimeError: there is none now, see the class.
        """
        return self._of_step("batch", self._batch)

    @property
    def losses(self) -> Mapping[str, Tensor]:
        """What the model returned in this iteration: name -> detached scalar tensor on the device; as ``batch``."""
        self._losses = self._of_step("losses", self._losses).detach()
        return self._losses.values

    @property
    def trained_losses(self) -> Sequence[str]:
        """The names of those among ``losses`` that are minimized, the others are only logged; as ``batch``."""
        return self._of_step("trained_losses", self._losses).trained

    def _of_step(self, name: str, value: _T | None) -> _T:
        if value is None:
            raise RuntimeError(
                f"trainer.{name} is there in after_backward, and in after_step of hooks above the save point, which a "
                "resumed run does not call again below it; register the hook with a priority of at most NORMAL, or "
                "with before=PeriodicCheckpointer"
            )
        return value

    def end_step(self) -> None:
        self._batch = self._losses = None

    # ------------------------------------------------------------------ what may be another object later

    @property
    def model(self) -> nn.Module:
        """Set to another one between two runs only; to a wrapper of the same at any time."""
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        check_exchange(self, model=model)
        self._model = model
        # masks of -inf and the like; finding them waits for the device, once
        self._never_finite = set() if self.non_finite == "ignore" else {*non_finite_names(model)}

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Set to another one between two runs only."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        check_exchange(self, optimizer=optimizer)
        self._optimizer = optimizer
        if self.non_finite == "skip" or self._judge.scaled:
            prepare_to_skip(optimizer, str(self._device() or "cpu").partition(":")[0])

    @property
    def data_loader(self) -> Iterable[Any]:
        """Set to another one at any time: the next iteration draws from it."""
        return self._data_loader

    @data_loader.setter
    def data_loader(self, data_loader: Iterable[Any]) -> None:
        self._data_loader = data_loader
        self._iterator: Iterator[Any] | None = None  # batches of the old one that it has drawn ahead go with it

    # ------------------------------------------------------------------ parts of a step, for variants to override

    def compute_gradients(self, batches: Sequence[Any]) -> Losses:
        """From the micro-batches to the gradients of their mean loss: zero_grad, forward, backward, unscale."""
        if not self._has_stepped:
            self._has_stepped = True
            self.settle_buckets(batches[0])
        if self.non_finite == "skip":
            self._former_buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        if self.zero_grad_before_forward:
            self.optimizer.zero_grad()
        found: list[Losses] = []
        for batch in batches[:-1]:
            with self._without_gradient_sync():
                found.append(self._add_gradients(batch, len(batches), first=not found))
        found.append(self._add_gradients(batches[-1], len(batches), first=not found))
        self.prepare_gradients()
        return mean_losses(found)

    def _add_gradients(self, batch: Any, num_batches: int, *, first: bool) -> Losses:
        losses = self.compute_losses(batch)
        if first and not self.zero_grad_before_forward:
            self.optimizer.zero_grad()
        self.backward(losses.total if num_batches == 1 else losses.total / num_batches)
        # few look at what is detached; with the graph they are let go at the next fetch, as in a plain loop
        return losses if num_batches == 1 else losses.detach()

    def compute_losses(self, batch: Any) -> Losses:
        """The forward pass."""
        losses = parse_losses(self.call_model(batch))
        if not self._losses_described:
            if taken := sorted(losses.values.keys() & STORED_BESIDE_LOSSES):
                raise ValueError(f"the trainer stores {taken} itself; give the model's entry another name")
            logged = [name for name in losses.values if name not in losses.trained]
            logger.info("Minimizing %s%s", " + ".join(losses.trained), f"; only logging {logged}" if logged else "")
            self._losses_described = True
        return losses

    def call_model(self, batch: Any) -> Any:
        return self.model(batch)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def prepare_gradients(self) -> None:
        """Make the gradients true ones before anybody looks at them."""

    def judge_gradients(self, losses: Losses) -> dict[str, Tensor]:
        """Flag what is not finite, and clip the gradients; returns what is worth storing of that, on the device."""
        flags = self.update_flags()
        if self.non_finite != "ignore":
            self._gradient_check.mark_non_finite(self.optimizer, flags)
        skips = self.non_finite == "skip"
        self._flag = join_flags(flags, losses.total.device) if flags or skips else None
        if skips:
            self._leave_out(losses.total)
        return self.clip()

    def clip(self) -> dict[str, Tensor]:
        """Clip the gradients, if asked to; returns the norm, if that is known."""
        norm = None if self.clip_gradients is None else self.clip_gradients(self.model.parameters())
        return {} if norm is None else {"grad_norm": norm}

    def update(self) -> None:
        if self.non_finite == "skip" and self._flag is not None:
            step_unless(self._flag, self.optimizer)
        else:
            self.optimizer.step()

    # ------------------------------------------------------------------ values that are not finite

    def update_flags(self) -> dict[torch.device, Tensor]:
        """By device: 1 where the update is to be left out. A gradient scaler has its own."""
        if self.non_finite == "skip" or self.metrics.has_failed:  # else it stays 0 until a failure ends the run
            self._flags = {}
        return self._flags

    def _leave_out(self, total: Tensor) -> None:
        """Flag the update on all ranks if that is so on one, and put back the buffers; does not wait for the device."""
        flag = self._flag
        assert flag is not None
        flag.masked_fill_(~total.isfinite(), 1.0)
        if comm.get_world_size() > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        skipped = flag.bool()
        for name, buffer in self.model.named_buffers():
            if name in self._former_buffers:  # and not made by this forward pass
                torch.where(skipped.to(buffer.device), self._former_buffers[name], buffer, out=buffer)
        self._former_buffers = {}

    def check_finite(self) -> None:
        """Raise what is wrong in any iteration so far, or in the model itself, on all ranks, which all have to call it.

        Waits for the device. What is behind it may be saved and evaluated; under "ignore" it does nothing.

        Raises:
            FloatingPointError: a loss, a gradient, a parameter or a buffer is not finite on some rank.
        """
        raise_failure(self.gather(self.find_failure(self._ranks_agree)))

    def find_failure(self, everywhere: bool = True) -> str | None:
        """What is wrong in the model on this rank.

        Args:
            everywhere: every rank calls this now, so metrics that are left over are exchanged.

        Raises:
            FloatingPointError: on every rank, if an iteration was not finite on one of them.
        """
        if everywhere:
            self.metrics.finish()
        if self.non_finite == "ignore":
            return None
        names = [name for name in non_finite_names(self.model) if name not in self._never_finite]
        if not names:
            return None
        return (
            f"the model is not finite in iteration {self.iter}, though its losses and gradients were: "
            f"{', '.join(names[:5])} ({len(names)} in all). Lower the learning rate, or look at what goes into them"
        )

    def begin_run(self) -> None:
        self._flags = {}  # what a run that failed has left
        self.metrics.begin_run()

    # ------------------------------------------------------------------ data

    @property
    def _data_loader_iter(self) -> Iterator[Any]:
        # made at the first use, so that a trainer which only evaluates starts no workers
        if self._iterator is None:
            self._iterator = iter(self.data_loader)
        return self._iterator

    @property
    def iters_per_epoch(self) -> int:
        """Iterations per pass over the training data, from the length of the loader or of its dataset.

        Raises:
            ValueError: the data has no length.
        """
        batches = iters_per_epoch(self.data_loader)
        if batches is None:
            raise ValueError(
                f"the training data ({type(self.data_loader).__name__}) is a stream without a length, so there are no "
                "epochs; use iterations"
            )
        return max(1, -(-batches // self.accumulation_steps))

    def reset_data_loader(self, data_loader_builder: Callable[[], Iterable[Any]]) -> None:
        """Go on with another loader; the old one and its workers are let go before the new one is built.

        Batches drawn ahead are dropped. The new loader begins where it says: to keep the place in the data, give it the
        ``state_dict`` of the old one.
        """
        self.data_loader = ()
        self.data_loader = data_loader_builder()

    def _fetch(self) -> tuple[list[Any], float]:
        """The micro-batches of this iteration on the model's device, and the seconds that this took.

        An epoch that ends inside an iteration makes its window shorter: the rest belongs to the next iteration.
        """
        start = time.perf_counter()
        self.end_step()  # where nobody has, in a loop of one's own: let go before the next batch is made
        batches = self._draw()
        device = self._device()
        if device is not None and device.type != "cpu":
            batches = self._prefetcher.move(batches, device)
        self._batch = batches[0] if self.accumulation_steps == 1 else batches
        return batches, time.perf_counter() - start

    def _draw(self) -> list[Any]:
        """The micro-batches of an iteration; if the run stops here, the data stand as if none had been drawn."""
        batches: list[Any] = []
        can_go_back = self.accumulation_steps > 1 and isinstance(self.data_loader, ResumableLoader)
        before = self.data_state_dict() if can_go_back else None  # costs too much with loaders of others
        try:
            batch = next_batch(self._data_loader_iter, _END)
            batches.append(self._begin_data_anew() if batch is _END else batch)
            while len(batches) < self.accumulation_steps:
                if (batch := next_batch(self._data_loader_iter, _END)) is _END:
                    break
                batches.append(batch)
        except Abandoned as stop:
            stop.nothing_done = before is not None or not batches
            self.load_data_state_dict(self.data_state_dict() if before is None else before)
            raise
        return batches

    def _device(self) -> torch.device | None:
        """That of the model; looked for once per model, which may be large."""
        if self._sample[0] is not self.model:
            self._sample = self.model, first_tensor(self.model)
        tensor = self._sample[1]
        return None if tensor is None else tensor.device

    def _begin_data_anew(self) -> Any:
        ended, self._iterator = self._iterator, None
        batch = next_batch(self._data_loader_iter, _END)
        if batch is _END:
            raise ValueError(
                f"the data loader ({type(self.data_loader).__name__}) "
                + ("is an iterator that has ended" if ended is self.data_loader else "yields no batch")
                + f" in iteration {self.iter} of {self.max_iter}; give a loader that can be iterated again and "
                "has at least one batch (is the dataset smaller than a batch, with drop_last?)"
            )
        return batch

    def _without_gradient_sync(self) -> AbstractContextManager[Any]:
        """Gradients are averaged over ranks once per iteration, with the last micro-batch."""
        if is_sharded_model(self.model):
            return without_reduction(self.model)
        no_sync = getattr(self.model, "no_sync", None)
        return nullcontext() if no_sync is None else no_sync()

    def settle_buckets(self, batch: Any) -> None:
        """Backward passes that leave no trace, before the first step: one, or two for a static graph.

        Behind its first one DDP puts its buckets into another order, and with them the additions over three or more
        ranks; a resumed run would have the first order where the other has the second. A static graph is recorded in
        the first one, which fails under ``no_sync``, and has its order behind the second.
        """
        if not isinstance(self.model, DistributedDataParallel):
            return
        passes = 2 if self.model.static_graph else 1
        if passes == 1 and comm.get_world_size() < 3:
            return
        former = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        with preserve_rng_state(), EventStorage():
            for _ in range(passes):
                self.compute_losses(copy.deepcopy(batch)).total.backward()
        for name, buffer in self.model.named_buffers():
            if name in former:  # and not made by these passes
                buffer.copy_(former[name])
        for parameter in self.model.parameters():
            parameter.grad = None

    # ------------------------------------------------------------------ metrics

    @staticmethod
    def write_metrics(
        loss_dict: Mapping[str, Tensor | float], data_time: float, cur_iter: int, prefix: str = ""
    ) -> None:
        """Average losses over ranks and put them into the open storage; for loops with a ``run_step`` of their own.

        Every rank calls it, with any names. Entries that require grad make up ``total_loss``; all of them do if none
        requires grad. ``data_time`` is in seconds.

        Raises:
            FloatingPointError: the total is not finite on some rank.
            ValueError: there is no entry.
        """
        if not loss_dict:
            raise ValueError("loss_dict is empty; there is nothing to write")
        tensors = {name: torch.as_tensor(value) for name, value in loss_dict.items()}
        trained = [name for name, value in tensors.items() if value.requires_grad] or list(tensors)
        values, _ = StepRecord(Losses.of(tensors, trained), data_time, cur_iter).read()
        [mean], _ = exchange_rows([Row(cur_iter, data_time, values)], 1, purpose="write_metrics")
        if not math.isfinite(mean.values["total_loss"]):
            raise FloatingPointError(describe_failure("loss is", cur_iter, mean.values))
        put_row(mean, data_time, prefix)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "data": self.data_state_dict(), **self.step_state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.load_data_state_dict(state_dict.get("data", {}))
        self.load_step_state_dict(state_dict)

    def step_state_dict(self) -> dict[str, Any]:
        """What the steps have changed, the model aside; equal on all ranks."""
        if has_event_storage():
            get_event_storage().flush()  # what is counted is counted when it is stored
        return {"optimizer": self.optimizer.state_dict(), "non_finite": self._judge.state_dict()}

    def load_step_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``step_state_dict`` gave; its hyper-parameters win over those of this run.

        Raises:
            ConfigError: it is of an optimizer of another kind, or with another number of parameter groups.
        """
        check_saved_groups(state_dict["optimizer"]["param_groups"], self.optimizer)
        before = hyper_parameters(self.optimizer)
        self.optimizer.load_state_dict(shard_optimizer_state(state_dict["optimizer"], self.optimizer))
        self._judge.load_state_dict(state_dict.get("non_finite", {}))  # detectron2 does not count
        if changes := describe_changes(before, hyper_parameters(self.optimizer)):
            logger.warning("The optimizer goes on with the values of the checkpoint, not of this run:\n%s", changes)

    def data_state_dict(self) -> dict[str, Any]:
        """Where the data stand, behind the batches of the iterations done; empty if the loader does not say."""
        return {} if resume_obstacle(self.data_loader) else self.data_loader.state_dict()  # type: ignore[attr-defined]

    def load_data_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the loader go on there; batches that it has drawn ahead are dropped."""
        self._iterator = None
        obstacle = resume_obstacle(self.data_loader)
        if state_dict and not obstacle:
            self.data_loader.load_state_dict(state_dict)  # type: ignore[attr-defined]
        elif state_dict or not obstacle:
            logger.warning("The data begin anew: %s", obstacle or "the checkpoint does not say where they stood")

    def make_iterators(self) -> None:
        self._data_loader_iter  # noqa: B018

    def describe_inexact(self) -> list[str]:
        inexact = [*super().describe_inexact()]
        if lost := resume_obstacle(self.data_loader):
            inexact.append(lost)
        device = device_of(self.model)
        if device is not None and device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
            inexact.append(f"kernels on {device.type} may add in any order (DETERMINISTIC in a config changes that)")
        if torch.backends.cudnn.benchmark and device is not None and device.type == "cuda":
            inexact.append("cuDNN chooses its kernels anew by their speed (CUDNN_BENCHMARK in a config)")
        return inexact


class AMPTrainer(SimpleTrainer):
    """`SimpleTrainer` in mixed precision: the forward pass under autocast, float16 with a gradient scaler.

    Parameters, gradients and the optimizer's state stay in float32. bfloat16 has the range of float32 and needs no
    scaler. An update with overflown gradients is skipped by the scaler, and so is one whose gradients are not finite
    behind ``after_backward``; ``skipped_updates`` in the storage is their number so far. Schedules are functions of the
    iteration, so they are not delayed by that.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Any],
        optimizer: torch.optim.Optimizer,
        gather_metric_period: int = 1,
        zero_grad_before_forward: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        precision: torch.dtype = torch.float16,
        log_grad_scaler: bool = False,
        async_write_metrics: bool = False,
        *,
        loss_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            grad_scaler: default is a dynamic one for float16 and none for bfloat16.
            precision: ``torch.float16`` or ``torch.bfloat16``.
            log_grad_scaler: store the scale that an iteration has used as ``[metric]grad_scaler``.
            loss_scale: for float16, a fixed scale instead of a dynamic one. It is a setting and no part of the state.
            kwargs: as in `SimpleTrainer`.

        Raises:
            ValueError: another precision; a ``loss_scale`` that is not greater than 0, or together with a scaler or
                bfloat16; a model that runs on several devices of one process; fused SGD with dampening under a scaler.
        """
        super().__init__(
            model, data_loader, optimizer, gather_metric_period, zero_grad_before_forward, async_write_metrics, **kwargs
        )
        if precision not in (torch.float16, torch.bfloat16):
            raise ValueError(f"precision must be torch.float16 or torch.bfloat16, got {precision}")
        if isinstance(model, nn.DataParallel) or len(getattr(model, "device_ids", None) or ()) > 1:
            raise ValueError("AMPTrainer needs one device per process; use create_ddp_model instead of DataParallel")
        device = device_of(model)
        self._device_type = "cpu" if device is None else device.type
        self.precision = precision
        self.log_grad_scaler = log_grad_scaler
        self._loss_scale = loss_scale
        if loss_scale is not None:
            if grad_scaler is not None or precision != torch.float16 or not 0 < loss_scale < math.inf:
                raise ValueError(
                    "loss_scale must be a number greater than 0, for float16 and without a grad_scaler, got "
                    f"{loss_scale!r} with {precision} and grad_scaler={grad_scaler!r}; leave it out for a dynamic scale"
                )
            grad_scaler = torch.amp.GradScaler(self._device_type, init_scale=loss_scale)
            grad_scaler.set_growth_factor(1.0)
            grad_scaler.set_backoff_factor(1.0)
        self.grad_scaler = grad_scaler or torch.amp.GradScaler(self._device_type, enabled=precision == torch.float16)
        self._unscaled = False
        self._judge.scaled = self.grad_scaler.is_enabled()
        if self._judge.scaled and self.non_finite != "skip":
            prepare_to_skip(optimizer, self._device_type)

    def compute_losses(self, batch: Any) -> Losses:
        with torch.autocast(self._device_type, dtype=self.precision):
            return super().compute_losses(batch)

    def backward(self, loss: Tensor) -> None:
        self.grad_scaler.scale(loss).backward()

    def prepare_gradients(self) -> None:
        scaler = self.grad_scaler
        if scaler.is_enabled():
            if self._unscaled:  # the last step failed behind this point; the scaler has to forget it
                scaler.update(scaler.get_scale())
            self._unscaled = True
            scaler.unscale_(self.optimizer)

    def update_flags(self) -> dict[torch.device, Tensor]:
        if not self.grad_scaler.is_enabled():
            return {}
        # what decides in step() whether it updates; anything public would wait for the device
        return cast(dict[torch.device, Tensor], self.grad_scaler._found_inf_per_device(self.optimizer))

    def update(self) -> None:
        if not self.grad_scaler.is_enabled():
            super().update()
            return
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        self._unscaled = False

    def judge_gradients(self, losses: Losses) -> dict[str, Tensor]:
        extra = super().judge_gradients(losses)
        if self.log_grad_scaler and self.grad_scaler.is_enabled():
            scale = self.grad_scaler._get_scale_async()
            if scale is not None:
                extra["[metric]grad_scaler"] = scale
        return extra

    def step_state_dict(self) -> dict[str, Any]:
        """With the scale, unless it is fixed."""
        scaler = self.grad_scaler.state_dict() if self._loss_scale is None else {}
        return {**super().step_state_dict(), "grad_scaler": scaler}

    def load_step_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_step_state_dict(state_dict)
        if not self.grad_scaler.is_enabled() or self._loss_scale is not None:
            return
        if state_dict.get("grad_scaler"):
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        else:
            logger.warning("The checkpoint has no gradient scale; it starts from %g", self.grad_scaler.get_scale())


_END = object()
