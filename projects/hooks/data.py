"""Hooks on the data that a `DefaultTrainer` gets by itself: the epoch of a sampler, and copies of the next batch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trainkit.data.epochs import epoch_listeners
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils.device import device_of, move_to_device, runs_ahead
from trainkit.utils.periods import is_last, is_nth, periods_done


def is_due_epoch(trainer: Any, period: int, *, offset: int = 0, or_last: bool = False) -> bool:
    """Whether an action with this period in epochs is due; call it at the end of an epoch."""
    if or_last and is_last(trainer):
        return True
    # an iteration may end several epochs
    first = trainer.epoch + 1
    last = max(first, periods_done(trainer.iter + 1, trainer.epoch_length))
    return any(is_nth(epoch, period, offset) for epoch in range(first, last + 1))


@HOOK_REGISTRY.register()
class SamplerSeed(HookBase):
    """Tell the epoch to a loader that never ends, and that has an order of its own for each epoch.

    ``set_epoch(epoch)`` of the loader, its sampler and its dataset is called if it exists, before each epoch. Where a
    pass over the data ends, such as with ``torch.utils.data.DistributedSampler``, a `SimpleTrainer` calls it itself.
    """

    priority = 43

    @classmethod
    def is_needed(cls, trainer: Any) -> bool:
        return trainer.has_epochs and bool(epoch_listeners(trainer.data_loader))

    def before_train(self) -> None:
        self.before_epoch()

    def before_epoch(self) -> None:
        # not trainer.epoch, which is rounded: the pass that a resumed run continues may end inside this iteration
        epoch = self.trainer.iter // self.trainer.epoch_length
        for listener in epoch_listeners(self.trainer.data_loader):
            listener.set_epoch(epoch)


@HOOK_REGISTRY.register()
class CopyAhead(HookBase):
    """Batches are copied on a separate stream, so the next one is copied while the device still computes.

    The stream of the computation waits for the copies on the device; the host does not wait. No batch is drawn earlier.
    Batches with other objects than plain tensors are copied by the stream of the computation.
    """

    _stream: torch.Stream | None = None

    @classmethod
    def is_needed(cls, trainer: Any) -> bool:
        device = device_of(trainer.model)
        return device is not None and runs_ahead(device)

    def before_train(self) -> None:
        self.trainer.feed.move = self.move

    def move(self, batch: Any, device: torch.device) -> Any:
        is_plain = all(_is_plain(leaf) or _stays(leaf) for leaf in tree_leaves(batch))
        if not is_plain or not runs_ahead(device):
            return move_to_device(batch, device)
        if self._stream is None or self._stream.device != device:
            self._stream = torch.Stream(device)
        current = torch.accelerator.current_stream(device)
        with self._stream:
            moved = move_to_device(batch, device)
        current.wait_stream(self._stream)
        for leaf in filter(_is_plain, tree_leaves(moved)):
            # the next batch must not get this memory during the computation
            leaf.record_stream(current)
        return moved


def _stays(value: Any) -> bool:
    return not hasattr(value, "to") and not isinstance(value, Mapping | list | tuple)


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested
