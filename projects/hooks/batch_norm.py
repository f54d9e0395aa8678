"""The statistics of batch norm: of the current weights in place of the moving average, and equal on all ranks."""

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from trainkit.projects.hooks.averaging import EMAHook

from trainkit.engine.hook_base import HOOK_REGISTRY, SAVE_POINT, HookBase
from trainkit.evaluation.observer import Phase
from trainkit.utils import comm
from trainkit.utils.device import move_to_device, unwrap_model
from trainkit.utils.env import preserve_rng_state
from trainkit.utils.events import EventStorage
from trainkit.utils.periods import check_period, is_due
from trainkit.utils.protocol import resume_obstacle

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class PreciseBN(HookBase):
    """Recompute the running statistics of batch norm every ``period`` iterations and after the last one.

    The statistics are taken over ``num_iter`` batches of ``data_loader`` (and over all ranks) in train mode, each batch
    with the same weight: the mean of the means, and the mean of the variances plus the variance of the means, see Wu
    and Johnson, "Rethinking 'Batch' in BatchNorm", section 3. The loader, which only this hook uses, starts again each
    time, so the result is a function of the weights. Random state is restored. Without batch norm in train mode, the
    hook does nothing. With ``period`` 0 it runs only after the last iteration. ``start``: if not 0, it first runs after
    this many iterations, as an evaluation with TEST.EVAL_START.
    """

    priority = 47  # before the checkpointer: the statistics are part of what is saved and evaluated

    def __init__(
        self, period: int, model: nn.Module, data_loader: Any, num_iter: int, *, start: int = 0
    ) -> None:
        self._period, self._start = check_period("period", period), check_period("start", start)
        self._num_iter = check_period("num_iter", num_iter, minimum=1)
        self._model = unwrap_model(
            model
        )  # a wrapper may exchange buffers: not with unequal numbers of batches
        self._data_loader = data_loader
        # the state holds the seed: with SEED -1, a resumed run would draw another seed
        self._data_state = {} if resume_obstacle(data_loader) else self._data_loader.state_dict()
        layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        self._layers = [layer for layer in layers if layer.training and layer.track_running_stats]
        if not self._layers:
            logger.warning("PreciseBN is off: the model has no batch norm in train mode")

    @classmethod
    def config_arguments(cls, trainer: Any) -> dict[str, Any]:
        if not hasattr(trainer, "build_train_loader"):  # it only evaluates
            return {}
        cfg = trainer.cfg.clone()
        cfg.defrost()
        cfg.DATALOADER.NUM_WORKERS = 0  # it is used rarely
        loader = trainer.build_train_loader(
            cfg
        )  # its own, which does not disturb the order of the training data
        test = {
            "period": cfg.TEST.EVAL_PERIOD,
            "start": cfg.TEST.EVAL_START,
            "num_iter": cfg.TEST.PRECISE_BN.NUM_ITER,
        }
        return {**test, "model": trainer.model, "data_loader": loader}

    def after_step(self) -> None:
        if self._layers and is_due(self.trainer, self._period, offset=self._start, or_last=True):
            self.update_stats()

    def state_dict(self) -> dict[str, Any]:
        return {"data": self._data_state}  # where the loader starts each time

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["data"] and not resume_obstacle(self._data_loader):
            self._data_state = state_dict["data"]
            self._data_loader.load_state_dict(self._data_state)

    @torch.no_grad()
    def update_stats(self) -> None:
        """Compute the statistics now; the model must be in train mode. Raises ValueError if there is no batch."""
        device, count = next(self._model.parameters()).device, 0
        mean = var = between = torch.zeros_like(_pack(self._layers, "running_mean"))
        with EventStorage(), preserve_rng_state(), _batch_statistics(self._layers):
            for batch in itertools.islice(self._data_loader, self._num_iter):
                self._model(move_to_device(batch, device))
                new, count = _pack(self._layers, "running_mean"), count + 1
                # running means over batches; `between` becomes the variance of the batches' means (Welford)
                delta = new - mean
                mean = mean + delta / count
                between = between + (delta * (new - mean) - between) / count
                var = var + (_pack(self._layers, "running_var") - var) / count
        mean, var, count = _over_ranks(mean, var + between, count)
        if count == 0:
            raise ValueError("the data loader of PreciseBN yields no batch")
        sizes = [layer.num_features for layer in self._layers]
        for layer, new_mean, new_var in zip(
            self._layers, mean.split(sizes), var.split(sizes), strict=True
        ):
            layer.get_buffer("running_mean").copy_(new_mean)
            layer.get_buffer("running_var").copy_(new_var)


def _pack(layers: list[_BatchNorm], buffer: str) -> torch.Tensor:
    """The buffers of all layers as one new tensor, shape ``[sum of num_features]``."""
    return torch.cat([layer.get_buffer(buffer) for layer in layers])


def _over_ranks(
    mean: torch.Tensor, var: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Mean, variance and count over the batches of all ranks, equal on every rank; the argument ``count`` is local."""
    if comm.get_world_size() == 1:
        return mean, var, count
    sums = torch.cat([mean * count, mean.new_tensor([count])])
    dist.all_reduce(sums)
    total_mean, total = sums[:-1] / sums[-1], sums[-1]
    square = (var + (mean - total_mean).square()) * count
    dist.all_reduce(square)
    return total_mean, square / total, int(total)


@contextmanager
def _batch_statistics(layers: list[_BatchNorm]) -> Iterator[None]:
    """Context in which running statistics are those of the last batch alone; they are restored at the end."""
    saved = [
        (layer, layer.momentum, [(buffer, buffer.clone()) for buffer in layer.buffers()])
        for layer in layers
    ]
    try:
        for layer in layers:
            layer.momentum = 1.0
        yield
    finally:
        for layer, momentum, buffers in saved:
            layer.momentum = momentum
            for buffer, value in buffers:
                buffer.copy_(value)


@HOOK_REGISTRY.register()
class SyncBuffers(HookBase):
    """Average the model's buffers over ranks, such as the running statistics of batch norm.

    This happens every ``period`` iterations (0: after each epoch, if the trainer has epochs), after the last one, and
    before an evaluation if there was a step since. Integer buffers stay as they are. An `EMAHook` that copies buffers
    copies the averaged ones.
    """

    priority = SAVE_POINT - 1  # checkpoint and evaluation must see the same buffers on all ranks
    _state_names = ("_has_stepped",)

    def __init__(self, period: int = 0) -> None:
        self._period = check_period("period", period)
        self._has_stepped = False  # since the buffers were averaged

    def after_step(self) -> None:
        self._has_stepped = True
        period = self._period or (self.trainer.iters_per_epoch if self.trainer.has_epochs else 0)
        if is_due(self.trainer, period, or_last=True):
            self._sync()

    def before_eval(self, phase: Phase, name: str) -> None:
        self._sync()

    @torch.no_grad()
    def _sync(self) -> None:
        has_stepped, self._has_stepped = self._has_stepped, False
        if not has_stepped or comm.get_world_size() == 1:
            return
        buffers = [
            buffer
            for buffer in unwrap_model(self.trainer.model).buffers()
            if buffer.is_floating_point()
        ]
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            alike = [buffer for buffer in buffers if buffer.dtype == dtype]
            flat = torch.cat([buffer.flatten() for buffer in alike])
            dist.all_reduce(flat)
            flat /= comm.get_world_size()
            for buffer, mean in zip(
                alike, flat.split([buffer.numel() for buffer in alike]), strict=True
            ):
                buffer.copy_(mean.view_as(buffer))
        for hook in self.trainer.hooks:
            if isinstance(hook, EMAHook):
                hook.copy_buffers()
