"""The hooks of methods that compare two views: SimSiam, DenseCL and SwAV."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.config import ConfigError
from trainkit.engine import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY, check_number, check_period
from trainkit.solver import start_momentum
from trainkit.utils import comm
from trainkit.utils.device import device_of
from trainkit_selfsup.protocol import model_of

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class SimSiamHook(HookBase):
    """Keep the predictor's learning rate at ``lr`` in every iteration; the schedule does not change it.

    See arXiv:2011.10566, section 4.2. The model needs no special attributes. The optimizer has parameter groups with
    ``fix_lr: True`` or ``fixed_lr: True``; without one this is an error before training. In a config, an entry of
    ``SOLVER.PARAM_GROUPS.CUSTOM_KEYS`` makes them: ``{KEY: predictor, FIXED_LR: True}``. If ``fix_pred_lr`` is False,
    the hook does nothing.
    """

    def __init__(self, fix_pred_lr: bool, lr: float) -> None:
        self._fix_pred_lr = fix_pred_lr
        self._lr = check_number("lr", lr, "[0, inf)")

    def _groups(self) -> list[dict[str, Any]]:
        if not self._fix_pred_lr:
            return []
        groups = self.trainer.optimizer.param_groups
        return [group for group in groups if group.get("fix_lr") or group.get("fixed_lr")]

    def before_train(self) -> None:
        if self._fix_pred_lr and not self._groups():
            raise ConfigError(
                "SimSiamHook needs a parameter group with fix_lr or fixed_lr, such as that of "
                "{KEY: predictor, FIXED_LR: True} in SOLVER.PARAM_GROUPS.CUSTOM_KEYS"
            )

    def before_step(self) -> None:
        for group in self._groups():
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self._lr)  # in place: a captured graph reads this tensor
            else:
                group["lr"] = self._lr


@HOOK_REGISTRY.register()
class DenseCLHook(HookBase):
    """Leave out the dense loss in the first iterations, because early features cannot match positions of two views.

    See arXiv:2011.09157. The model has ``loss_lambda``, a number that its loss reads in each forward pass. The hook
    sets it to 0 before iteration ``start_iters``. From this iteration on, and after the end of the run, it has the
    model's own value. With ``momentum`` the hook calls ``update_key_encoder(momentum)`` of the model after each update.
    """

    _model: Any = None

    def __init__(self, start_iters: int = 1000, momentum: float | None = None) -> None:
        if momentum is not None:
            check_number("momentum", momentum, "[0, 1]")
        self._start_iters = check_period("start_iters", start_iters)
        self._momentum = momentum

    def before_train(self) -> None:
        needed = ["loss_lambda"]
        if self._momentum is not None:
            needed.append("update_key_encoder")
        self._model = model_of(self, *needed)
        self._loss_lambda = self._model.loss_lambda

    def before_step(self) -> None:
        has_started = self.trainer.iter >= self._start_iters
        self._model.loss_lambda = self._loss_lambda if has_started else 0.0

    def after_step(self) -> None:
        if self._momentum is not None:
            self._model.update_key_encoder(self._momentum)

    def after_train(self) -> None:
        if self._model is not None:
            self._model.loss_lambda = self._loss_lambda


@HOOK_REGISTRY.register()
class SwAVHook(HookBase):
    """Create the queue of the loss in its first epoch, and freeze layers in the first iterations (arXiv:2006.09882).

    The model has ``head.loss`` with ``queue`` and ``use_queue``. The hook sets ``queue`` to zeros
    ``[len(crops_for_assign), rows, feat_dim]`` on the model's device; before that it is None. The loss fills it, and
    sets ``use_queue`` when it is full. Every checkpoint holds both, for each rank.

    The gradients of a frozen layer are None at the update, so neither weight decay nor momentum changes it.

    Args:
        batch_size: samples per iteration of one rank.
        epoch_queue_starts: the first epoch with a queue, counted from 0.
        crops_for_assign: the crops that are assigned to prototypes; the queue has a part for each.
        feat_dim: the length of an embedding.
        queue_length: rows over all ranks, rounded down to whole batches of all ranks; each rank has its part. 0: there
            is no queue.
        interval: has no effect. In MMSelfSup, the queue is saved every ``interval`` epochs.
        frozen_layers_cfg: part of a parameter's name -> the first iteration that updates it.

    Raises ConfigError before training: the model has no such loss, no parameter has a name of ``frozen_layers_cfg``,
    the data have no epochs, or ``queue_length`` is less than one batch.
    """

    def __init__(
        self,
        batch_size: int,
        epoch_queue_starts: int = 15,
        crops_for_assign: Sequence[int] = (0, 1),
        feat_dim: int = 128,
        queue_length: int = 0,
        interval: int = 1,
        frozen_layers_cfg: Mapping[str, int] | None = None,
    ) -> None:
        self._batch_size = check_period("batch_size", batch_size, minimum=1)
        self._epoch_queue_starts = check_period("epoch_queue_starts", epoch_queue_starts)
        self._num_crops = len(crops_for_assign)
        self._feat_dim = check_period("feat_dim", feat_dim, minimum=1)
        self._queue_length = check_period("queue_length", queue_length)
        if check_period("interval", interval, minimum=1) != 1:
            logger.warning(
                "SwAVHook: interval %r has no effect; every checkpoint has the queue", interval
            )
        self._frozen: dict[str, int] = {}
        for name, iters in (frozen_layers_cfg or {}).items():
            self._frozen[name] = check_period(f"frozen_layers_cfg[{name}]", iters)
        self._loss: Any = None
        self._waiting_state: dict[str, Any] = {}  # until training starts

    def before_train(self) -> None:
        needed = []
        if self._queue_length > 0:
            needed = ["head.loss.queue", "head.loss.use_queue"]
        model = model_of(self, *needed)
        self._device = device_of(model)
        self._loss = None
        if self._queue_length > 0:
            self._loss = model.head.loss
            self._rows = self._rows_of_rank()
            self._prepare_queue()
        self._layers = []
        for name, iters in self._frozen.items():
            parameters = [parameter for path, parameter in model.named_parameters() if name in path]
            if not parameters:
                raise ConfigError(
                    f"frozen_layers_cfg: no parameter of {type(model).__name__} has {name!r} "
                    "in its name"
                )
            self._layers.append((iters, parameters))
            if self.trainer.start_iter < iters:
                # fused SGD fails if only some of a group have a momentum
                start_momentum(self.trainer.optimizer)

    def _rows_of_rank(self) -> int:
        """The rows of the queue of this rank: whole batches."""
        batch = self._batch_size * comm.get_world_size()
        rows = self._queue_length // batch * self._batch_size
        if rows == 0 or not self.trainer.has_epochs:
            raise ConfigError(
                f"SwAVHook: queue_length {self._queue_length}; accepted: at least one batch of all "
                f"ranks, {batch}, and data with a length, that is with epochs"
            )
        return rows

    def _prepare_queue(self) -> None:
        """Give the loss the queue of a loaded state; in a new run it has none."""
        if self._waiting_state:
            queue = self._waiting_state["queue"]
            if queue is not None:
                queue = queue.to(self._device, copy=True)
            self._loss.queue = queue
            self._loss.use_queue = self._waiting_state["use_queue"]
        elif self.trainer.start_iter == 0:
            self._loss.queue = None
            self._loss.use_queue = False
        self._waiting_state = {}

    def before_step(self) -> None:
        if self._loss is None or self._loss.queue is not None:
            return
        if self.trainer.epoch >= self._epoch_queue_starts:
            shape = (self._num_crops, self._rows, self._feat_dim)
            self._loss.queue = torch.zeros(shape, device=self._device)

    def after_backward(self) -> None:
        for iters, parameters in self._layers:
            if self.trainer.iter < iters:
                for parameter in parameters:
                    parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """``queue`` and ``use_queue`` of the loss."""
        if self._waiting_state or self._loss is None:
            return self._waiting_state
        queue: Tensor | None = self._loss.queue
        if queue is not None:
            queue = queue.clone()
        return {"queue": queue, "use_queue": bool(self._loss.use_queue)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._waiting_state = state_dict
