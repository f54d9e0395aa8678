"""The trainer for one model, one loss and one optimizer."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.engine.feed import Feed
from trainkit.engine.finite import FiniteCheck, NonFinitePolicy, parameters_of, prepare_to_skip
from trainkit.engine.forwarding import check_exchange, forwarded
from trainkit.engine.loop import TrainerBase
from trainkit.engine.metrics import FLAG, LaterCalls, MetricPath, StepRecord, check_losses, write_metrics
from trainkit.engine.parallel import settle_buckets, without_gradient_sync
from trainkit.solver.param_groups import compare_with_saved
from trainkit.utils.device import first_tensor
from trainkit.utils.events import get_event_storage, has_event_storage
from trainkit.utils.losses import Losses, mean_losses, parse_losses

logger = logging.getLogger(__name__)


def _of_step(name: str, path: str, doc: str) -> Any:
    """A property that can be read until the save point of an iteration."""
    source, get = attrgetter(path.partition(".")[0]), attrgetter(path)

    def read(trainer: Any) -> Any:
        if source(trainer) is None:
            raise RuntimeError(
                f"trainer.{name} is there in after_backward, and in after_step above the save point, since a resumed "
                "run starts below; register the hook with a priority of at most NORMAL, or before=PeriodicCheckpointer"
            )
        return get(trainer)

    return property(read, doc=doc)


class SimpleTrainer(TrainerBase):
    """One model, one loss (or a sum of losses), one optimizer, one data source.

    For two optimizers or a GAN, subclass `TrainerBase` and define ``run_step``. Hooks can read ``batch``, ``losses``
    and ``outputs`` in ``after_backward``, and in ``after_step`` above the save point.

    Attributes:
        feed: draws the batches.
        finite: finds values that are not finite.
        metrics: stores the losses.
    """

    own_keys = (*TrainerBase.own_keys, "data")

    batch = _of_step("batch", "_batch", "The batch of this iteration; a list of micro-batches if accumulated.")
    losses = _of_step("losses", "_losses.detached", "Name -> scalar on the device.")
    trained_losses = _of_step("trained_losses", "_losses.trained", "Names of the losses that are minimized.")
    outputs = _of_step("outputs", "_losses.outputs", "The entry ``outputs`` that the model returned.")
    data_loader = forwarded("feed.loader", "Can be replaced at any time; the next iteration uses the new one.")
    reset_data_loader = forwarded("feed.reset")
    accumulation_steps = forwarded("feed.accumulation_steps", "Micro-batches per iteration.")
    iters_per_epoch = forwarded("feed.iters_per_epoch", "Iterations per pass over the data; ValueError if endless.")
    gather_metric_period = forwarded("metrics.gather_period")
    non_finite = forwarded("finite.policy")
    _data_loader_iter = forwarded("feed.iterator")
    _data_loader_iter_obj = forwarded("feed._iterator", "None: the next iteration iterates over the loader again.")
    write_metrics = staticmethod(write_metrics)

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Any],
        optimizer: torch.optim.Optimizer,
        gather_metric_period: int = 1,
        zero_grad_before_forward: bool = False,
        async_write_metrics: bool = False,
        *,
        accumulation_steps: int | Sequence[tuple[int, int]] = 1,
        clip_gradients: Callable[[Iterable[Tensor]], Tensor | None] | None = None,
        non_finite: NonFinitePolicy = "raise",
        max_non_finite_in_row: int = 25,
        exchange_period: int = 1,
    ) -> None:
        """The model is set to train mode here, once; code that changes the mode later must restore it.

        Args:
            model: takes what ``data_loader`` yields and returns a loss, or a dict of losses by name. Those that
                require grad are added up and minimized, the others are only logged. An entry ``outputs`` is for hooks.
            data_loader: an iterable; when it ends, it is iterated again.
            gather_metric_period: average the metrics over ranks, and store them, once per this number of iterations.
            zero_grad_before_forward: zero the gradients before the forward pass, not after it; this takes less memory.
            async_write_metrics: a pool of one worker waits for the losses, exchanges them with other ranks, stores
                them and calls the writers. An error there ends the run at most 20 iterations later. On a CPU the loop
                itself checks the losses before the update.
            accumulation_steps: micro-batches per iteration; for a mean loss they equal one batch. Schedule: see `Feed`.
            clip_gradients: called with the optimizer's parameters after ``after_backward``, as a `GradientClipper`; an
                optimizer with the same rule does not clip again. What it returns, shape ``[]``, becomes ``grad_norm``.
            non_finite: if the total loss, or a gradient after ``after_backward``, is not finite: "raise" ends the run;
                "skip" leaves out the update on all ranks and the step's changes of buffers, and counts it in the
                storage as ``skipped_updates``; "ignore" checks nothing.
            max_non_finite_in_row: this number of skipped updates in a row ends the run, also if a gradient scaler skips
                them under "raise". After 25 of them a scale of 2**16 has fallen to 2**-9.
            exchange_period: with several ranks, the number of iterations between exchanges of metrics. Metrics are
                stored, and a failure of a rank is raised, only at an exchange.

        Raises:
            ValueError: fused SGD with dampening under "skip"; a period below 1; ``non_finite`` is none of the three.
        """
        super().__init__()
        model.train()
        self.feed = Feed(data_loader, accumulation_steps)
        self.finite = FiniteCheck(non_finite, max_non_finite_in_row)
        self.metrics = MetricPath(self.finite, gather_metric_period, exchange_period, async_write_metrics)
        self.zero_grad_before_forward = zero_grad_before_forward
        self.async_write_metrics = async_write_metrics
        self.concurrent_executor = LaterCalls() if async_write_metrics else None  # detectron2's name
        self.clip_gradients = clip_gradients
        self._batch: Any = None  # like _losses, it is of this iteration, until the save point
        self._losses: Losses | None = None
        self._used_lr: list[Any] | None = None  # the rates of the last update; None during a step
        self._is_first_step = True
        self.model = model
        self.optimizer = optimizer
        steps = self.feed.schedule or self.feed.accumulation_steps
        if steps != 1 and any(isinstance(module, _BatchNorm) for module in model.modules()):
            text = "Batch norm treats each micro-batch separately: %s do not equal one large batch. Group norm would"
            logger.warning(text, steps)

    def run_step(self) -> None:
        """Fetch, zero_grad, forward, backward, after_backward, clip, metrics, update."""
        if not self.model.training:
            raise RuntimeError("the model is in eval mode; code that calls model.eval() must call model.train() again")
        try:
            start = time.perf_counter()
            self._batch = self._losses = self._used_lr = None  # release them before the next batch is made
            batches = self.fetch()
            data_time = time.perf_counter() - start
            if self._is_first_step:
                settle_buckets(self.model, batches[0], lambda batch: self.compute_losses(batch).total)
            self._losses = losses = self.compute_gradients(batches)
            self.after_backward()
            record = self.record(losses, data_time)
            if self._writes_itself:
                self._let_write(record, losses)
            self.metrics.add(record, is_last=self.iter + 1 == self.max_iter)
            self.update()  # after the record: values that are not finite must not reach the weights
        except (RuntimeError, TypeError, AttributeError) as error:
            self.feed.explain(error, None if self._losses else self._batch)
            raise

    def end_update(self) -> None:
        self._used_lr = _learning_rates(getattr(self, "optimizer", None))  # a subclass may have no attribute optimizer

    def end_step(self) -> None:
        self._batch = self._losses = None

    @property
    def used_lr(self) -> list[Any]:
        """The learning rates of this iteration's update by parameter group, also after the schedule's step."""
        return _learning_rates(self.optimizer) if self._used_lr is None else self._used_lr

    def _write_metrics(
        self, loss_dict: Mapping[str, Tensor | float], data_time: float, prefix: str = "", iter: int | None = None
    ) -> None:
        """Call `write_metrics` in iterations whose metrics are gathered.

        If a subclass overrides one of the two, `run_step` calls this method in these iterations instead of storing the
        losses, in the worker if ``async_write_metrics``. The losses have no graph.
        """
        if ((iter := self.iter if iter is None else iter) + 1) % self.gather_metric_period == 0:
            self.write_metrics(loss_dict, data_time, iter, prefix)

    @cached_property
    def _writes_itself(self) -> bool:
        stock = getattr(self._write_metrics, "__func__", None) is SimpleTrainer._write_metrics
        return not stock or self.write_metrics is not write_metrics

    def _let_write(self, record: StepRecord, losses: Losses) -> None:
        """Call the overridden `_write_metrics` if this iteration is gathered."""
        record.written = losses.scalars.keys()
        if (self.iter + 1) % self.gather_metric_period:
            return
        # copies, since the worker reads them later; `write_metrics` adds up those that require grad
        copies = {name: value.detach().clone() for name, value in losses.values.items()}
        for name in losses.trained:
            copies[name].requires_grad_()
        if self.concurrent_executor is None:
            self._write_metrics(copies, record.data_time)
        else:
            self.concurrent_executor.submit(self._write_metrics, copies, record.data_time, iter=self.iter)

    # ------------------------------------------------------------------ parts of a step, for variants to override

    def fetch(self) -> list[Any]:
        """The micro-batches of this iteration on the model's device."""
        batches = self.feed.next(self._device, self.iter)
        self._batch = batches[0] if self.accumulation_steps == 1 else batches
        return batches

    def compute_gradients(self, batches: Sequence[Any]) -> Losses:
        """Compute the gradients of the micro-batches' mean loss: zero_grad, forward, backward, unscale."""
        self.finite.keep_buffers(self.model)
        if self.zero_grad_before_forward:
            self.optimizer.zero_grad()
        found, num = list[Losses](), len(batches)
        for batch in batches:  # ranks average gradients once, in the backward pass of the last micro-batch
            with nullcontext() if len(found) == num - 1 else without_gradient_sync(self.model):
                losses = self.compute_losses(batch)
                if not (found or self.zero_grad_before_forward):
                    self.optimizer.zero_grad()
                self.backward(losses.total if num == 1 else losses.total / num)
            # a single batch keeps its graph until the next fetch, as in a plain loop; others free it now
            found.append(losses := losses if num == 1 else losses.detach())
        self.prepare_gradients()
        return mean_losses(found)

    def compute_losses(self, batch: Any) -> Losses:
        losses = parse_losses(self.call_model(batch))
        if self._is_first_step:
            self._is_first_step = False
            check_losses(losses)
            logged = [name for name in losses.values if name not in losses.trained]
            logger.info("Minimizing %s%s", " + ".join(losses.trained), f"; only logging {logged}" if logged else "")
        return losses

    def call_model(self, batch: Any) -> Any:
        return self.model(batch)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def prepare_gradients(self) -> None:
        """Unscale the gradients, if they are scaled, before other code reads them."""

    def record(self, losses: Losses, data_time: float) -> StepRecord:
        return StepRecord({**losses.scalars, **self.judge_gradients(losses)}, data_time, self.iter)

    def judge_gradients(self, losses: Losses) -> dict[str, Tensor]:
        """Flag what is not finite, and clip the gradients; returns the flag and values to store, on the device."""
        flag, norm = self.finite.flag_update(self.model, self.optimizer, losses.total), None
        if self.clip_gradients is not None:
            norm = self.clip_gradients(parameters_of(self.optimizer, self.model))
            if norm is not None and "grad_norm" in losses.values:  # a model may return it only later
                check_losses(losses, has_norm=True)
        return {name: value for name, value in ((FLAG, flag), ("grad_norm", norm)) if value is not None}

    def update(self) -> None:
        self.finite.step(self.optimizer)

    # ------------------------------------------------------------------ parts that may be replaced between runs

    def _set_model(self, model: nn.Module) -> None:
        check_exchange(self, "model", model)
        self._model, self._sample = model, first_tensor(model)
        self.finite.watch(model)

    @property
    def _device(self) -> torch.device:
        """The device of the model, which may be moved between runs."""
        return torch.device("cpu") if self._sample is None else self._sample.device

    model: Any = property(attrgetter("_model"), _set_model, doc="Exchanged between runs only; wrapped at any time.")

    def _set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        check_exchange(self, "optimizer", optimizer)
        self._optimizer = optimizer
        if self.finite.skips:
            prepare_to_skip(optimizer, self._device.type)

    optimizer: Any = property(attrgetter("_optimizer"), _set_optimizer, doc="Set to another one between two runs only.")

    # ------------------------------------------------------------------ runs and state

    def begin_run(self) -> None:
        self.finite.reset()
        self.metrics.reset()

    def make_iterators(self) -> None:
        _ = self.feed.iterator

    def find_failure(self, everywhere: bool = True) -> str | None:
        if everywhere:
            self.metrics.finish()
        return self.finite.describe_model(self.model, self.iter)

    def describe_inexact(self) -> list[str]:
        inexact = [*super().describe_inexact(), *filter(None, [self.feed.obstacle])]
        device = self._device.type
        if device != "cpu" and not torch.are_deterministic_algorithms_enabled():
            inexact.append(f"kernels on {device} may add in any order (DETERMINISTIC in a config changes that)")
        if torch.backends.cudnn.benchmark and device == "cuda":
            inexact.append("cuDNN chooses kernels again by their speed (CUDNN_BENCHMARK in a config)")
        return inexact

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "data": self.feed.state_dict(), **self.step_state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.feed.load_state_dict(state_dict.get("data", {}))
        self.load_step_state_dict(state_dict)

    def step_state_dict(self) -> dict[str, Any]:
        """The state changed by steps, without the model; equal on all ranks."""
        if has_event_storage():
            get_event_storage().flush()  # updates are counted when they are stored
        state = {"optimizer": self.optimizer.state_dict(), "non_finite": self.finite.state_dict()}
        return {**state, "used_lr": self._used_lr}

    def load_step_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; its hyper-parameters replace those of this run.

        Raises:
            ConfigError: it is of another kind of optimizer, or has another number of parameter groups.
        """
        changes = compare_with_saved(self.optimizer.param_groups, state_dict["optimizer"]["param_groups"])
        state, adapt = state_dict["optimizer"], getattr(self.model, "optimizer_state_to_load", None)
        self.optimizer.load_state_dict(adapt(state, self.optimizer) if adapt else state)
        self.finite.load_state_dict(state_dict.get("non_finite", {}))  # detectron2 has no such entry
        self._used_lr = state_dict.get("used_lr")
        if changes:
            logger.warning("The optimizer uses the values of the checkpoint, not of this run:\n%s", changes)


def _learning_rates(optimizer: Any) -> list[Any]:
    """The learning rate of each parameter group; a tensor is copied, since a schedule changes it in place."""
    groups = getattr(optimizer, "param_groups", ())  # a wrapper may have no groups
    return [rate if type(rate := group.get("lr")) is not Tensor else rate.clone() for group in groups]
