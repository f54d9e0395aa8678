"""The trainer for one model, one loss and one optimizer."""

import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from fractions import Fraction
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.checkpoint.errors import loading
from trainkit.checkpoint.optimizer_groups import describe_groups, names_in
from trainkit.checkpoint.optimizer_state import fit_state, load_optimizer
from trainkit.data.epochs import epoch_listeners, not_reached
from trainkit.engine.data_size import DataSize, data_size_of, describe_changes
from trainkit.engine.feed import Feed
from trainkit.engine.finite import non_finite_names
from trainkit.engine.loop import TrainerBase
from trainkit.engine.losses import (
    Losses,
    as_losses,
    explain_first_call,
    mean_losses,
    parse_losses,
)
from trainkit.engine.metrics import (
    STORED_BESIDE_LOSSES,
    DirectCalls,
    MetricPath,
    write_metrics,
)
from trainkit.engine.parallel import (
    explain_unused_parameters,
    settle_buckets,
    without_gradient_sync,
)
from trainkit.engine.policies import NonFinitePolicy, make_policy
from trainkit.engine.untrained import UntrainedParameters
from trainkit.utils.device import device_of
from trainkit.utils.events.storage import EventStorage
from trainkit.utils.logger import format_table
from trainkit.utils.periods import check_period, round_length

logger = logging.getLogger(__name__)


def forwarded(path: str, doc: str = "") -> Any:
    """A property that reads and sets an attribute of a part: ``forwarded("feed.loader")``."""
    part, _, name = path.rpartition(".")
    get_part = attrgetter(part)

    def write(trainer: Any, value: Any) -> None:
        setattr(get_part(trainer), name, value)

    return property(attrgetter(path), write, doc=doc)


def _until_save_point(name: str, path: str, doc: str) -> Any:
    """A property ``name`` that can be read until the save point of an iteration.

    Args:
        path: of its value. The first attribute is None before a step and from the save point on.
    """
    first_attribute = path.partition(".")[0]
    get = attrgetter(path)

    def read(trainer: Any) -> Any:
        if getattr(trainer, first_attribute) is None:
            raise AttributeError(
                f"trainer.{name} is there in after_backward, and in after_step above the save "
                "point, since a resumed run starts below; register the hook with a priority of at "
                "most NORMAL, or before=hooks.PeriodicCheckpointer"
            )
        return get(trainer)

    return property(read, doc=doc)


class SimpleTrainer(TrainerBase):
    """One model, one loss (or a sum of losses), one optimizer, one data source.

    For two optimizers or a GAN, subclass `TrainerBase` and define ``run_step``. Hooks can read
    ``batch``, ``losses`` and ``outputs`` in ``after_backward``, and in ``after_step`` above the
    save point. A variant overrides parts of the step: ``fetch``, ``compute_losses``, ``backward``,
    ``before_update``, ``_write_metrics``, ``update``.

    Attributes:
        model, optimizer: replaced between two runs only, since hooks, schedule and checkpointer
            keep theirs.
        feed: draws the batches.
        metrics: takes the losses to the storage.
        accumulation_steps: micro-batches per iteration.
        policy: what happens to values that are not finite.
        extra: further values of this iteration for the storage, shape ``[]``; `judge_numbers`
            takes out flags, such as `SKIP_FLAG`.
    """

    own_keys = (*TrainerBase.own_keys, "data")

    batch = _until_save_point(
        "batch", "_batch", "The batch of this iteration; if accumulated, the present micro-batch."
    )
    losses = _until_save_point("losses", "_losses.detached", "Name -> scalar on the device.")
    trained_losses = _until_save_point(
        "trained_losses", "_losses.trained", "Names of the losses that are minimized."
    )
    outputs = _until_save_point(
        "outputs", "_losses.outputs", "The entry ``outputs`` that the model returned."
    )
    data_loader = forwarded(
        "feed.loader", "Can be replaced at any time; the next iteration uses the new one."
    )
    reset_data_loader = forwarded("feed.reset")
    gather_metric_period = forwarded("metrics.gather_period")
    skipped_updates = forwarded(
        "policy.skipped_updates", "The number of updates that were left out."
    )
    _data_loader_iter = forwarded("feed.iterator")
    _data_loader_iter_obj = forwarded(
        "feed._iterator", "None: the next iteration iterates over the loader again."
    )

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
        non_finite: str | NonFinitePolicy = "raise",
        max_non_finite_in_row: int = 25,
        exchange_period: int = 1,
    ) -> None:
        """The model is set to train mode here, once.

        Code that changes the mode later must restore it.

        Args:
            model: takes what ``data_loader`` yields and returns a loss, or a dict of losses by
                name. Those that require grad are added up and minimized, the others are only
                logged. An entry ``outputs`` is for hooks.
            data_loader: an iterable; when it ends, it is iterated again.
            gather_metric_period: average the metrics over ranks, and store them, once per this
                number of iterations.
            zero_grad_before_forward: zero the gradients before the forward pass, not after it; this
                takes less memory.
            async_write_metrics: a pool of one worker waits for the losses, exchanges them with
                other ranks, stores them and calls the writers. An error there ends the run at most
                20 iterations later.
            accumulation_steps: micro-batches per iteration, drawn one after the other; for a mean
                loss, those of one size equal one batch.
            clip_gradients: called with the optimizer's parameters after ``after_backward``, as a
                `GradientClipper`; an optimizer with the same rule does not clip again. What it
                returns, shape ``[]``, becomes ``grad_norm``.
            non_finite: "raise" ends the run if the loss, or a norm that ``clip_gradients`` returns,
                is not finite: before the update on a CPU, else at most 20 iterations later, and
                before anything is saved. The model is checked at each save. "ignore" checks
                nothing. Or a `NonFinitePolicy`.
            max_non_finite_in_row: so many updates in a row that are left out end the run, see
                `NonFinitePolicy`.
            exchange_period: with several ranks, the number of iterations between exchanges of
                metrics. Metrics are stored, and a failure of a rank is raised, only at an exchange.

        Raises:
            ValueError: a period below 1; ``non_finite`` is not known.
        """
        super().__init__()
        if clip_gradients is not None and not callable(clip_gradients):
            raise TypeError(
                f"clip_gradients must be a function of the parameters, got {clip_gradients!r}; to "
                'limit the norm of all gradients, give GradientClipper("full_model", 1.0)'
            )
        self.policy = make_policy(non_finite, max_non_finite_in_row)
        self.policy.bind(optimizer)
        model.train()
        self.model = model
        self.optimizer = optimizer
        self.feed = Feed(data_loader)
        trainer = weakref.proxy(self)  # a strong reference would keep the trainer alive
        self.feed.before_pass = lambda: trainer.tell_epoch()
        self.metrics = MetricPath(
            trainer, gather_metric_period, exchange_period, async_write_metrics
        )
        self.accumulation_steps = check_period("accumulation_steps", accumulation_steps, minimum=1)
        self.zero_grad_before_forward = zero_grad_before_forward
        self.async_write_metrics = async_write_metrics
        # detectron2's name
        self.concurrent_executor = DirectCalls() if async_write_metrics else None
        self.clip_gradients = clip_gradients
        # of this iteration, until the save point
        self._batch: Any = None
        self._losses: Losses | None = None
        self.extra: dict[str, Tensor] = {}
        self._fix_epochs()
        self._data_sec = 0.0
        self._is_first_step = True
        self._owner = weakref.proxy(self)  # the trainer whose steps these are
        self._untrained = UntrainedParameters()
        self._note_model()
        has_batch_norm = any(isinstance(module, _BatchNorm) for module in model.modules())
        if has_batch_norm and accumulation_steps > 1:
            logger.warning(
                "Batch norm treats each micro-batch separately: %d do not equal one large batch. "
                "Group norm would",
                accumulation_steps,
            )

    def run_step(self) -> None:
        """Fetch, zero_grad, forward, backward, unscale, after_backward, clip, metrics, update."""
        if not self.model.training:
            raise RuntimeError(
                "the model is in eval mode; code that calls model.eval() must call model.train() "
                "again"
            )
        self._batch = self._losses = None  # release them before the next batch is made
        self._data_sec = 0.0
        self.feed.drawn = 0
        losses = self.compute_gradients()
        self._losses = losses
        self.before_update()
        # before the update: the weights must stay finite
        self._write_metrics(losses, self._data_sec, iter=self.iter)
        self.update()

    # ------------------------------------------------------------------ parts of a step

    def compute_gradients(self) -> Losses:
        """Fetch, zero_grad, forward and backward for each micro-batch.

        The gradients are those of the mean loss.
        """
        self.policy.before_gradients(self.model)
        if self.accumulation_steps == 1:
            return self._add_gradients(self.draw())
        found: list[Losses] = []
        for batch, is_last in self.micro_batches():
            # ranks average gradients once, in the backward pass of the last micro-batch
            with nullcontext() if is_last else without_gradient_sync(self.model):
                # frees the graph
                found.append(self._add_gradients(batch, is_first=not found).detach())
            del batch  # the next one may be drawn
        return mean_losses(found)

    def micro_batches(self) -> Iterator[tuple[Any, bool]]:
        """Each micro-batch of this iteration, and whether it is the last one.

        It is drawn when it is asked for.
        """
        for number in range(1, self.accumulation_steps + 1):
            yield self.draw(), number == self.accumulation_steps

    def draw(self) -> Any:
        """`fetch`, with the time that it takes; the result becomes ``batch``."""
        start = time.perf_counter()
        batch = self.fetch()
        self._batch = batch
        self._data_sec += time.perf_counter() - start
        if self._is_first_step:  # of DistributedDataParallel
            settle_buckets(self.model, batch, lambda batch: self.compute_losses(batch).total)
        return batch

    def fetch(self) -> Any:
        """The next batch, or micro-batch, on the model's device."""
        return self.feed.next(self._device)

    def _add_gradients(self, batch: Any, *, is_first: bool = True) -> Losses:
        """Zero_grad, if this is the first micro-batch, forward and backward."""
        if is_first and self.zero_grad_before_forward:
            self.optimizer.zero_grad()
        losses = self.compute_losses(batch)
        if is_first and not self.zero_grad_before_forward:
            self.optimizer.zero_grad()
        share = losses.total  # of this micro-batch in the mean loss
        if self.accumulation_steps > 1:
            share = share / self.accumulation_steps
        self.backward(share)
        return losses

    def compute_losses(self, batch: Any) -> Losses:
        """The losses of the forward pass.

        Raises ValueError if one has a name that the trainer stores itself.
        """
        losses = parse_losses(self.call_model(batch))
        if self._is_first_step:
            self._is_first_step = False
            self._check_first_losses(losses)
        return losses

    def call_model(self, batch: Any) -> Any:
        try:
            return self.model(batch)
        except Exception as error:
            explain_unused_parameters(self.model, error)
            if self._is_first_step and self.iter == 0:  # a resumed run has called it before
                explain_first_call(batch, error)
            raise

    def _check_first_losses(self, losses: Losses) -> None:
        """Refuse losses that no step can use; log which are minimized."""
        stored = set(STORED_BESIDE_LOSSES)
        if self.clip_gradients is not None:
            stored.add("grad_norm")
        taken = sorted(losses.keys() & stored)
        if taken:
            raise ValueError(
                f"the trainer stores {taken} itself; give the model's entry another name"
            )
        if any(value.is_complex() for value in losses.values()):
            raise TypeError(f"one of {[*losses]} is complex; give its abs() or real part")
        only_logged = [name for name in losses if name not in losses.trained]
        others = f"; only logging {only_logged}" if only_logged else ""
        logger.info("Minimizing %s%s", " + ".join(losses.trained), others)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def before_update(self) -> None:
        """Call ``after_backward`` of the hooks, and clip."""
        self.after_backward()
        self.extra = self.judge_and_clip(self._losses)

    def judge_and_clip(self, losses: Any) -> dict[str, Tensor]:
        """Let the policy see the gradients, and clip them; returns ``extra``."""
        extra = self.policy.see_gradients(self.optimizer, self.model, losses)
        extra |= self.flags()
        if self.clip_gradients is not None:
            norm = self.clip_gradients(parameters_of(self.optimizer, self.model))
            if norm is not None:
                extra["grad_norm"] = norm.detach()
        self.policy.judge(extra, self.model)
        return extra

    def flags(self) -> dict[str, Tensor]:
        """Values that a variant adds to ``extra`` in each step."""
        return {}

    def _write_metrics(
        self,
        loss_dict: Mapping[str, Tensor | float],
        data_time: float,
        prefix: str = "",
        iter: int | None = None,
    ) -> None:
        """Give the losses of an iteration, and ``extra``, to the storage.

        On an accelerator it waits for nothing. A subclass that overrides it, and does not call this
        method, stores and checks the losses itself.

        Args:
            loss_dict: name -> value, as the model has returned them. Those that require grad add up
                to ``total_loss``.
            data_time: in seconds.
            prefix: of all names in the storage.

        Raises:
            FloatingPointError: see ``non_finite``.
        """
        iteration = self.iter if iter is None else iter
        losses = as_losses(loss_dict)
        storage = self.storage_in_use()
        self.metrics.add(storage, iteration, data_time, losses, self.extra, prefix)

    write_metrics = staticmethod(write_metrics)  # detectron2's name

    def update(self) -> None:
        self.policy.update(self.optimizer)

    def judge_numbers(self, storage: EventStorage, iter: int, values: dict[str, Any]) -> str | None:
        """Judge the numbers of an iteration, maybe later and in a worker.

        See `NonFinitePolicy.judge_numbers`.
        """
        return self.policy.judge_numbers(storage, iter, values, self.metrics.gather_period)

    # ------------------------------------------------------------------ runs and state

    @property
    def made_no_step(self) -> bool:
        """Whether this trainer has computed no losses, since another ``run_step`` takes its place."""
        return self._is_first_step

    @property
    def iters_per_epoch(self) -> int:
        """`epoch_length`, rounded."""
        return round_length(self.epoch_length)

    @property
    def epoch_length(self) -> Fraction:
        """Iterations per pass over the training data, not rounded; fixed when the trainer is built.

        A loader without a length at that time may be replaced by one that has a length.

        Raises:
            ValueError: the data has no length.
        """
        if self._epoch_length is not None:
            return self._epoch_length
        return self.feed.epoch_length(self._steps_when_built)

    def _fix_epochs(self) -> None:
        """Epochs do not move if ``accumulation_steps`` or the loader changes later."""
        steps = self.accumulation_steps
        self._steps_when_built = steps
        self._epoch_length: Fraction | None = None
        if self.has_epochs:
            self._epoch_length = self.epoch_length
        self.data_size = data_size_of(self.data_loader, steps, self._epoch_length)

    def compare_data(self, state_dict: dict[str, Any]) -> None:
        """Warn of each difference between the data of this run and those of a loaded state."""
        rows = describe_changes(
            self.data_size, DataSize.from_state(state_dict.get("data_size", {}))
        )
        if rows:
            headers = ("data", "of this run", "in the checkpoint", "what happens")
            table = format_table(rows, headers)
            logger.warning("The training data are not those of the checkpoint:\n%s", table)

    def tell_epoch(self) -> None:
        """Before each pass, call ``set_epoch(epoch)`` of the loader's sampler and dataset.

        Those that do not have it are left out. Data without a length have no epochs: there it is
        the number of passes since the run has started.
        """
        listeners = epoch_listeners(self.data_loader)
        if not listeners:
            return
        lost = not_reached(self.data_loader)
        if lost and self.feed.num_passes == 0:
            logger.warning("Telling the epoch: %s", lost)
        epoch = self.feed.num_passes
        if self.has_epochs:
            share = Fraction(self.feed.drawn, self.accumulation_steps)
            passes = (self.iter + share) / self.epoch_length
            if self.feed.num_passes > 0:
                # one has just ended, so this is a whole number, but for the rounding of lengths
                passes += Fraction(1, 2)
            epoch = math.floor(passes)
        for listener in listeners:
            listener.set_epoch(epoch)

    def _note_model(self) -> None:
        """Note the device of the model, and its parts that are never finite, such as masks."""
        self._noted_model = self.model
        self._device = device_of(self.model) or torch.device("cpu")
        self._never_finite: set[str] = set()
        if self.policy.name != "ignore":
            self._never_finite = set(non_finite_names(self.model))

    def start_run(self) -> None:
        is_replaced = self.model is not self._noted_model
        if is_replaced or device_of(self.model) not in (self._device, None):  # None: no parameters
            self._note_model()
        self.metrics.reset()
        self.feed.drawn = 0
        self._watch_untrained()

    def share_run(self, owner: Any) -> None:
        super().share_run(owner)
        self._owner = weakref.proxy(owner)

    def _watch_untrained(self) -> None:
        """Warn of parameters that are in no optimizer when they get a gradient."""
        if hasattr(self.optimizer, "param_groups"):  # else it does not say what it trains
            owners = [weakref.proxy(self), self._owner, *self.hooks]
            self._untrained.watch(self.model, owners)

    def make_iterators(self) -> None:
        _ = self.feed.iterator

    def end_step(self) -> None:
        self._batch = self._losses = None
        self.feed.drawn = 0  # also if another ``run_step`` has drawn

    def before_check(self, ranks_agree: bool) -> None:
        self._watch_untrained()  # a hook may have added parameters
        if ranks_agree:
            self.metrics.finish(self.storage_in_use())

    def find_failure(self) -> str | None:
        if self.policy.name == "ignore":
            return None
        names = non_finite_names(self.model, except_for=self._never_finite)
        if not names:
            return None
        found = f"{', '.join(names[:5])} ({len(names)} in all)"
        if self.made_no_step:
            return f"the model is not finite after iteration {self.iter}: {found}"
        return (
            f"the model is not finite in iteration {self.iter}, though its losses were: {found}. "
            "A gradient of this or an earlier iteration was not finite"
        )

    def describe_inexact(self) -> list[str]:
        inexact = super().describe_inexact()
        if self.feed.obstacle:
            inexact.append(self.feed.obstacle)
        device = self._device.type
        if device != "cpu" and not torch.are_deterministic_algorithms_enabled():
            inexact.append(
                f"kernels on {device} may add in any order (DETERMINISTIC in a config changes that)"
            )
        if torch.backends.cudnn.benchmark and device == "cuda":
            inexact.append(
                "cuDNN chooses kernels again by their speed (CUDNN_BENCHMARK in a config)"
            )
        return inexact

    def saved_objects(self) -> Sequence[Any]:
        return [*super().saved_objects(), self.model, self.optimizer]

    def parameter_names(self) -> dict[str, Tensor]:
        return {**names_in({"": self.model}), **super().parameter_names()}

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "data": self.feed.state_dict(),
            "data_size": self.data_size.state_dict(),
            **self.step_state_dict(),
        }

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().check_state_dict(state_dict)
        self.check_step_state_dict(state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        with loading("the position in the data"):
            self.compare_data(state_dict)
            self.feed.load_state_dict(state_dict.get("data", {}))
        self.load_step_state_dict(state_dict)

    def step_state_dict(self) -> dict[str, Any]:
        """The state changed by steps, without the model; equal on all ranks."""
        self.storage_in_use().flush()  # updates that are left out are counted when they are stored
        return {
            "optimizer": self.optimizer.state_dict(),
            "optimizer_groups": describe_groups(self.optimizer, self.parameter_names()),
            "non_finite": self.policy.state_dict(),
        }

    def check_step_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the state does not fit; nothing is changed."""
        if "optimizer" in state_dict:
            groups = state_dict.get("optimizer_groups", [])
            fit_state(self.optimizer, state_dict["optimizer"], groups, self.parameter_names())

    def load_step_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; its hyper-parameters replace those of this run.

        Raises:
            CheckpointError: the optimizer, its groups or the shapes of its parameters are others.
        """
        self.policy.load_state_dict(state_dict.get("non_finite", {}))
        if "optimizer" not in state_dict:
            logger.warning(
                "The checkpoint has no entry 'optimizer': %s starts anew",
                type(self.optimizer).__name__,
            )
            return
        load_optimizer(
            self.optimizer,
            state_dict["optimizer"],
            state_dict.get("optimizer_groups", []),  # not in files of detectron2
            self.parameter_names(),
            getattr(self.model, "optimizer_state_to_load", None),
        )


def parameters_of(optimizer: Any, model: nn.Module) -> list[Tensor]:
    """The parameters of the optimizer, in its order.

    Those of the model if the optimizer has no ``param_groups``.
    """
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return [*model.parameters()]
    return [parameter for group in groups for parameter in group["params"]]
