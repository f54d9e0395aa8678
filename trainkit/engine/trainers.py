"""Trainers whose iteration is one update of one model by one optimizer."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.config import ConfigError
from trainkit.data.build import iters_per_epoch
from trainkit.engine.metrics import StepRecord, mean_losses, metrics_group, store_metrics
from trainkit.engine.train_loop import TrainerBase, check_period
from trainkit.utils import comm
from trainkit.utils.device import device_of, move_to_device
from trainkit.utils.events import get_event_storage
from trainkit.utils.losses import Losses, parse_losses

logger = logging.getLogger(__name__)


class SimpleTrainer(TrainerBase):
    """One model, one loss (or a sum of losses), one optimizer, one data source.

    Whoever needs more (two optimizers, a GAN) subclasses `TrainerBase` with its own ``run_step``.

    Attributes:
        batch: what the loader gave in this iteration, on the model's device; a list of micro-batches if
            ``accumulation_steps`` > 1. Like ``losses`` readable in ``after_backward`` and ``after_step``.
        losses: what the model returned: name -> detached scalar tensor on the device.
        trained_losses: the names of those among them that are minimized; the others are only logged.
    """

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
    ) -> None:
        """The model is set to train mode here, once; whoever changes the mode later puts it back.

        Args:
            model: takes what ``data_loader`` yields and returns a loss, or a dict of losses by name. Those that
                require grad are added up and minimized, the others are only logged.
            data_loader: an iterable; when it ends, it is iterated again.
            gather_metric_period: average the metrics over ranks, and store them, every so many iterations.
            zero_grad_before_forward: zero the gradients before the forward pass instead of behind it, which needs
                less memory where a model's forward is large.
            async_write_metrics: read the losses from the device in a worker thread. An error there, a loss
                that is not finite included, ends the run one log period later at most.
            accumulation_steps: micro-batches per iteration; equals one batch of so many times the size for losses
                that are means over the batch.
            clip_gradients: called with the parameters between ``after_backward`` and the update, such as
                `trainkit.solver.GradientClipper`; what it returns, shape ``[]``, is stored as ``grad_norm``.

        Raises:
            ValueError: a period is less than 1.
        """
        super().__init__()
        model.train()
        self.model = model
        self.data_loader = data_loader
        self.optimizer = optimizer
        self.gather_metric_period = check_period("gather_metric_period", gather_metric_period, minimum=1)
        self.zero_grad_before_forward = zero_grad_before_forward
        self.async_write_metrics = async_write_metrics
        self.accumulation_steps = check_period("accumulation_steps", accumulation_steps, minimum=1)
        self.clip_gradients = clip_gradients
        self.batch: Any = None
        self.losses: Mapping[str, Tensor] = {}
        self.trained_losses: Sequence[str] = ()
        self._iterator: Iterator[Any] | None = None
        self._losses_described = False
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
        batches, data_time = self._fetch()
        if self.zero_grad_before_forward:
            self.optimizer.zero_grad()
        found = []
        for i, batch in enumerate(batches):
            with self._gradient_sync(last=i == len(batches) - 1):
                losses = self.compute_losses(batch)
                if i == 0 and not self.zero_grad_before_forward:
                    self.optimizer.zero_grad()
                total = losses.total
                self.backward(total if len(batches) == 1 else total / len(batches))
            found.append(losses.detach())
        step_losses = mean_losses(found)
        self.losses, self.trained_losses = step_losses.values, step_losses.trained
        self.prepare_gradients()
        self.after_backward()
        extra = self.clip()
        # before the update: a loss that is not finite must not reach the weights
        self._write_metrics(step_losses, data_time, extra)
        self.update()

    # ------------------------------------------------------------------ parts of a step, for variants to override

    def compute_losses(self, batch: Any) -> Losses:
        """The forward pass."""
        losses = parse_losses(self.model(batch))
        if not self._losses_described:
            logged = [name for name in losses.values if name not in losses.trained]
            logger.info("Minimizing %s%s", " + ".join(losses.trained), f"; only logging {logged}" if logged else "")
            self._losses_described = True
        return losses

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def prepare_gradients(self) -> None:
        """Make the gradients true ones before anybody looks at them."""

    def clip(self) -> dict[str, Tensor]:
        """Clip the gradients, if asked to; returns what is worth storing of that, on the device."""
        norm = None if self.clip_gradients is None else self.clip_gradients(self.model.parameters())
        return {} if norm is None else {"grad_norm": norm}

    def update(self) -> None:
        self.optimizer.step()

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
            raise ValueError("the training data is a stream without a length, so there are no epochs; use iterations")
        return max(1, -(-batches // self.accumulation_steps))

    def reset_data_loader(self, data_loader_builder: Callable[[], Iterable[Any]]) -> None:
        """Go on with another loader; the old one and its workers are let go before the new one is built."""
        self._iterator = None
        self.data_loader = ()
        self.data_loader = data_loader_builder()

    def _fetch(self) -> tuple[list[Any], float]:
        """The micro-batches of this iteration on the model's device, and the seconds that this took.

        An epoch that ends inside an iteration makes its window shorter: the rest belongs to the next iteration.
        """
        start = time.perf_counter()
        self.batch, self.losses = None, {}  # let go before the next ones are made
        batches = [self._next_batch(may_begin=True)]
        while len(batches) < self.accumulation_steps and batches[-1] is not _END:
            batches.append(self._next_batch(may_begin=False))
        batches = [batch for batch in batches if batch is not _END]
        device = device_of(self.model)
        if device is not None and device.type != "cpu":
            batches = [move_to_device(batch, device) for batch in batches]
        self.batch = batches[0] if self.accumulation_steps == 1 else batches
        return batches, time.perf_counter() - start

    def _next_batch(self, *, may_begin: bool) -> Any:
        batch = next(self._data_loader_iter, _END)
        if batch is _END and may_begin:
            ended, self._iterator = self._iterator, None
            batch = next(self._data_loader_iter, _END)
            if batch is _END:
                raise ValueError(
                    f"the data loader ({type(self.data_loader).__name__}) "
                    + ("is an iterator that has ended" if ended is self.data_loader else "yields no batch")
                    + f" in iteration {self.iter} of {self.max_iter}; give a loader that can be iterated again and "
                    "has at least one batch (is the dataset smaller than a batch, with drop_last?)"
                )
        return batch

    def _gradient_sync(self, *, last: bool) -> AbstractContextManager[Any]:
        """Under DDP gradients are averaged over ranks once per iteration, with the last micro-batch."""
        no_sync = None if last else getattr(self.model, "no_sync", None)
        return nullcontext() if no_sync is None else no_sync()

    # ------------------------------------------------------------------ metrics

    def _write_metrics(self, losses: Losses, data_time: float, extra: dict[str, Tensor]) -> None:
        record = StepRecord(losses, data_time, self.iter, extra)
        if self.async_write_metrics:
            metrics_group()
            storage = get_event_storage()
            storage.start_deferring()
            storage.put_later(self._store_metrics, record)
            if comm.get_world_size() > 1:
                # now, not once per log period: a rank that reads the storage waits for the others' records of this step
                storage.hand_over()
        else:
            self._store_metrics(record)

    def _store_metrics(self, record: StepRecord) -> None:
        gather = (record.iter + 1) % self.gather_metric_period == 0
        store_metrics(record.names, record.values(), record.data_time, record.iter, gather=gather)

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
        record = StepRecord(Losses.of(tensors, trained).detach(), data_time, cur_iter)
        store_metrics(record.names, record.values(), data_time, cur_iter, prefix)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.optimizer.load_state_dict(state_dict["optimizer"])


class AMPTrainer(SimpleTrainer):
    """`SimpleTrainer` in mixed precision: the forward pass under autocast, float16 with a gradient scaler.

    Parameters, gradients and the optimizer's state stay in float32. bfloat16 has the range of float32 and needs no
    scaler. An update with overflown gradients is skipped by the scaler; ``skipped_updates`` in the storage is their
    number so far, counted on the device. Schedules are functions of the iteration, so they are not delayed by that.
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
        self._skipped_updates = torch.zeros((), device=device)
        self._not_finite_in_row = 0
        self._unscaled = False
        if self.grad_scaler.is_enabled():
            _zero_fill_momentum(optimizer)
            _say_if_waiting(optimizer, self._device_type)

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
            # what decides in step() whether it updates; anything public would wait for the device
            overflown = scaler._found_inf_per_device(self.optimizer).values()
            if overflown:
                on_one = [flag.to(self._skipped_updates.device, non_blocking=True) for flag in overflown]
                self._skipped_updates += torch.stack(on_one).amax()

    def update(self) -> None:
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        self._unscaled = False

    def _write_metrics(self, losses: Losses, data_time: float, extra: dict[str, Tensor]) -> None:
        if self.grad_scaler.is_enabled():
            extra["skipped_updates"] = self._skipped_updates
            scale = self.grad_scaler._get_scale_async() if self.log_grad_scaler else None
            if scale is not None:
                extra["[metric]grad_scaler"] = scale
        super()._write_metrics(losses, data_time, extra)

    def _store_metrics(self, record: StepRecord) -> None:
        """A loss beyond the range of float16 now and then is what the scaler is for; many in a row are a failure."""
        try:
            super()._store_metrics(record)
            self._not_finite_in_row = 0
        except FloatingPointError:
            self._not_finite_in_row += 1
            if not self.grad_scaler.is_enabled() or self._not_finite_in_row >= _MAX_NOT_FINITE_IN_ROW:
                raise
            logger.warning("The loss of iteration %d is not finite; its update is left to the scaler", record.iter)

    def state_dict(self) -> dict[str, Any]:
        """With the scale, unless it is fixed, and the number of skipped updates."""
        scaler = self.grad_scaler.state_dict() if self._loss_scale is None else {}
        return {**super().state_dict(), "grad_scaler": scaler, "skipped_updates": int(self._skipped_updates)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._skipped_updates.fill_(state_dict.get("skipped_updates", 0))
        if not self.grad_scaler.is_enabled() or self._loss_scale is not None:
            return
        if state_dict.get("grad_scaler"):
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        else:
            logger.warning("The checkpoint has no gradient scale; it starts from %g", self.grad_scaler.get_scale())


_END = object()


_MAX_NOT_FINITE_IN_ROW = 25  # a scale of 2**16 is down to 2**-9 by then


def _say_if_waiting(optimizer: torch.optim.Optimizer, device_type: str) -> None:
    if device_type != "cpu" and not getattr(optimizer, "_step_supports_amp_scaling", False):
        logger.warning(
            "%s has no fused implementation here, so under float16 every update waits for the device to learn whether "
            "to skip it; SGD, Adam, AdamW and Adagrad with fused=True do not, nor does bfloat16",
            type(optimizer).__name__,
        )


def _zero_fill_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Fused SGD leaves its momentum uninitialised if the scaler skips its very first update; zeros are what it means.

    With dampening 0 the first update from zeros equals the usual one: ``momentum * 0 + grad``.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):  # then the scaler calls no step that it skips
        return
    for group in optimizer.param_groups:
        if group.get("fused") and group.get("momentum"):
            if group.get("dampening"):
                raise ConfigError(
                    "fused SGD with dampening cannot skip its first update, as a scaler may ask; set fused=False "
                    "(in the config: SOLVER.OPTIMIZER.FUSED)"
                )
            for parameter in group["params"]:
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
