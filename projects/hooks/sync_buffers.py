"""Equal buffers on all ranks."""

import torch
import torch.distributed as dist
from trainkit.projects.hooks.ema import EMAHook

from trainkit.engine.hook_base import HOOK_REGISTRY, SAVE_POINT, HookBase
from trainkit.evaluation.observer import Phase
from trainkit.utils import comm
from trainkit.utils.device import unwrap_model
from trainkit.utils.periods import check_period, is_due


@HOOK_REGISTRY.register()
class SyncBuffers(HookBase):
    """Average the model's buffers over ranks, such as the running statistics of batch norm.

    This happens every ``period`` iterations, after the last one, and before an evaluation if there was a step since.
    Integer buffers stay as they are. An `EMAHook` that copies buffers copies the averaged ones.

    Args:
        period: in iterations; 0: at the end of each epoch, if the trainer has epochs.
    """

    priority = SAVE_POINT - 1  # checkpoint and evaluation must see the same buffers on all ranks
    _state_names = ("_has_stepped",)

    def __init__(self, period: int = 0) -> None:
        self._period = check_period("period", period)
        self._has_stepped = False  # since the buffers were averaged

    def before_train(self) -> None:
        if self.trainer.start_iter == 0:
            self._has_stepped = False

    def after_step(self) -> None:
        self._has_stepped = True
        period = self._period or (self.trainer.iters_per_epoch if self.trainer.has_epochs else 0)
        if is_due(self.trainer, period, or_last=True):
            self._sync()

    def before_eval(self, phase: Phase, name: str) -> None:
        if self._has_stepped:
            self._sync()

    @torch.no_grad()
    def _sync(self) -> None:
        self._has_stepped = False
        if comm.get_world_size() == 1:
            return
        buffers = [buffer for buffer in unwrap_model(self.trainer.model).buffers() if buffer.is_floating_point()]
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            alike = [buffer for buffer in buffers if buffer.dtype == dtype]
            flat = torch.cat([buffer.flatten() for buffer in alike])
            dist.all_reduce(flat)
            flat /= comm.get_world_size()
            for buffer, mean in zip(alike, flat.split([buffer.numel() for buffer in alike]), strict=True):
                buffer.copy_(mean.view_as(buffer))
        for hook in self.trainer.hooks:
            if isinstance(hook, EMAHook):
                hook.copy_buffers()
