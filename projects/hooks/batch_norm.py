"""The statistics of batch norm: of the current weights in place of the moving average, and equal on all ranks."""

import itertools
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from trainkit.projects.hooks.averaging import EMAHook

from trainkit.data.protocol import resume_obstacle
from trainkit.engine.hook_base import HOOK_REGISTRY, SAVE_POINT, HookBase
from trainkit.evaluation.observer import Phase
from trainkit.utils import comm
from trainkit.utils.device import device_of, move_to_device, preserve_buffers, unwrap_model
from trainkit.utils.env import preserve_rng_state
from trainkit.utils.events import EventStorage
from trainkit.utils.periods import check_period, is_due

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class PreciseBN(HookBase):
    """Recompute the running statistics of batch norm every ``period`` iterations and after the last one.

    They become the mean and the (unbiased) variance of all values that reach a layer in ``num_iter`` batches of
    ``data_loader``, in train mode and over all ranks, as if these were one batch; see Wu and Johnson, "Rethinking
    'Batch' in BatchNorm", section 3. So a batch counts by its size. The loader, which only this hook uses, starts again
    each time, so the result is a function of the weights. Random state and all other buffers are restored. Layers in
    eval mode, and layers that no value reaches, keep their statistics. The average of an `EMAHook` that copies buffers
    gets statistics of its own. Without batch norm in train mode, the hook does
    nothing. With ``period`` 0 it runs only after the last iteration. ``start``: if not 0, it first runs after this many
    iterations, as an evaluation with TEST.EVAL_START.

    Raises:
        ValueError: ``data_loader`` has a length that is less than ``num_iter``.
    """

    priority = 47  # before the checkpointer: the statistics are part of what is saved and evaluated

    def __init__(
        self, period: int, model: nn.Module, data_loader: Any, num_iter: int, *, start: int = 0
    ) -> None:
        self._period = check_period("period", period)
        self._start = check_period("start", start)
        self._num_iter = check_period("num_iter", num_iter, minimum=1)
        # a wrapper may exchange buffers
        self._model = unwrap_model(model)
        self._data_loader = data_loader
        # the state holds the seed: with SEED -1, a resumed run would draw another seed
        self._data_state = {} if resume_obstacle(data_loader) else self._data_loader.state_dict()
        self._layers: dict[str, nn.Module] = {}
        for name, layer in self._model.named_modules():
            if isinstance(layer, _BatchNorm) and layer.training and layer.track_running_stats:
                self._layers[name] = layer
        if not self._layers:
            logger.warning("PreciseBN is off: the model has no batch norm in train mode")
            return
        try:
            length = len(data_loader)
        except (TypeError, NotImplementedError):  # an endless sampler, a stream
            return
        if length < self._num_iter:
            raise ValueError(self._too_few(f"gives {length}"))

    def _too_few(self, found: str) -> str:
        return (
            f"PreciseBN needs {self._num_iter} batches (num_iter, in a config "
            "TEST.PRECISE_BN.NUM_ITER), but its data "
            f"loader {found}; lower num_iter, or give a loader with more batches"
        )

    @classmethod
    def config_arguments(cls, trainer: Any) -> dict[str, Any]:
        if not hasattr(trainer, "build_train_loader"):  # it only evaluates
            return {}
        cfg = trainer.cfg.clone()
        cfg.defrost()
        cfg.DATALOADER.NUM_WORKERS = 0  # it is used rarely
        # its own, which does not disturb the order of the training data
        loader = trainer.build_train_loader(cfg)
        return {
            "period": cfg.TEST.EVAL_PERIOD,
            "start": cfg.TEST.EVAL_START,
            "num_iter": cfg.TEST.PRECISE_BN.NUM_ITER,
            "model": trainer.model,
            "data_loader": loader,
        }

    def after_step(self) -> None:
        if not self._layers:
            return
        if not is_due(self.trainer, self._period, offset=self._start, or_last=True):
            return
        self.update_stats()
        for hook in self.trainer.hooks:
            if isinstance(hook, EMAHook):
                hook.compute_statistics(self.update_stats)

    def state_dict(self) -> dict[str, Any]:
        return {"data": self._data_state}  # where the loader starts each time

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["data"] and not resume_obstacle(self._data_loader):
            self._data_state = state_dict["data"]
            self._data_loader.load_state_dict(self._data_state)

    @torch.no_grad()
    def update_stats(self) -> None:
        """Compute the statistics now; every rank calls it, with the model in train mode.

        Raises:
            ValueError: the loader of some rank gave fewer batches than ``num_iter``. No statistics have changed.
        """
        device = device_of(self._model)
        layers = {name: layer for name, layer in self._layers.items() if layer.training}
        num_batches = 0
        with (
            EventStorage(),
            preserve_rng_state(),
            preserve_buffers(self._model.modules()),
            _without_compiling(),
            _observed(layers) as seen,
        ):
            for batch in itertools.islice(self._data_loader, self._num_iter):
                self._model(batch if device is None else move_to_device(batch, device))
                num_batches += 1
        fewest = min(comm.all_gather(num_batches))
        if fewest < self._num_iter:
            some_rank = " on some rank" if comm.get_world_size() > 1 else ""
            raise ValueError(self._too_few(f"gave {fewest}{some_rank}"))
        # the same order on every rank, so the same result
        by_rank = comm.all_gather({name: values.on_cpu() for name, values in seen.items()})
        unseen = []
        for name, layer in layers.items():
            total = _Values()
            for of_rank in by_rank:
                total.merge(*of_rank[name])
            if total.count == 0:
                unseen.append(name)
                continue
            layer.get_buffer("running_mean").copy_(total.mean)
            # torch's running_var is unbiased too
            layer.get_buffer("running_var").copy_(total.squares / max(total.count - 1, 1))
        if unseen:
            logger.warning("PreciseBN: no batch reached the layers %s; they keep theirs", unseen)


class _Values:
    """The number of values per channel, their mean, and the sum of squares of their distances from it."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Any = 0.0
        self.squares: Any = 0.0

    def add(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Add what a layer gets, shape ``[N, C, ...]``; as a hook of its forward pass."""
        values = inputs[0].detach()
        count = values.numel() // values.shape[1]
        if count == 0:
            return
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        dims = [dim for dim in range(values.dim()) if dim != 1]
        var, mean = torch.var_mean(values, dims, correction=0)
        if values.device.type != "mps":  # which has no float64
            var = var.double()
            mean = mean.double()
        self.merge(count, mean, var * count)

    def merge(self, count: int, mean: Any, squares: Any) -> None:
        """Add ``count`` other values (Chan, Golub and LeVeque, "Updating Formulae", 1979)."""
        if count == 0:
            return
        total = self.count + count
        delta = mean - self.mean
        self.mean = self.mean + delta * (count / total)
        self.squares = self.squares + squares + delta.square() * (self.count * count / total)
        self.count = total

    def on_cpu(self) -> tuple[int, Any, Any]:
        if self.count == 0:
            return 0, None, None
        return self.count, self.mean.cpu(), self.squares.cpu()


@contextmanager
def _observed(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, _Values]]:
    """Context that collects what each layer gets.

    It looks at the inputs: the layer itself stores nothing but its last call, and over all ranks if it is a
    SyncBatchNorm.
    """
    seen = {name: _Values() for name in layers}
    handles = [layer.register_forward_pre_hook(seen[name].add) for name, layer in layers.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _without_compiling() -> AbstractContextManager[Any]:
    """Context in which compiled models run as they are written: compiled code does not call new hooks of a layer."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to import it takes a second
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


@HOOK_REGISTRY.register()
class SyncBuffers(HookBase):
    """Average the model's buffers over ranks, such as the running statistics of batch norm.

    This happens every ``period`` iterations (0: after each epoch, if the trainer has epochs), after the last one, and
    before an evaluation if there was a step since. Integer buffers stay as they are. An `EMAHook` that copies buffers
    copies the averaged ones. A running variance becomes the mean of the ranks' variances, as in MMEngine's
    SyncBuffersHook; the variance of all values together, which also has that between the ranks, is `PreciseBN`'s.
    """

    priority = SAVE_POINT - 1  # checkpoint and evaluation must see the same buffers on all ranks
    _state_names = ("_has_stepped",)

    def __init__(self, period: int = 0) -> None:
        self._period = check_period("period", period)
        self._has_stepped = False  # since the buffers were averaged

    def after_step(self) -> None:
        self._has_stepped = True
        period: Any = self._period
        if period == 0 and self.trainer.has_epochs:
            period = self.trainer.epoch_length
        if is_due(self.trainer, period, or_last=True):
            self._sync()

    def before_eval(self, phase: Phase, name: str) -> None:
        self._sync()

    @torch.no_grad()
    def _sync(self) -> None:
        has_stepped = self._has_stepped
        self._has_stepped = False
        if not has_stepped or comm.get_world_size() == 1:
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in unwrap_model(self.trainer.model).buffers():
            if buffer.is_floating_point():
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([buffer.flatten() for buffer in buffers])
            dist.all_reduce(flat)
            flat /= comm.get_world_size()
            means = flat.split([buffer.numel() for buffer in buffers])
            for buffer, mean in zip(buffers, means, strict=True):
                buffer.copy_(mean.view_as(buffer))
        for hook in self.trainer.hooks:
            if isinstance(hook, EMAHook):
                hook.copy_buffers()
