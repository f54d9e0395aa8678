"""Copies the next batch to the device while it still computes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils.device import device_of, move_to_device, runs_ahead


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
        if not runs_ahead(device) or not all(_is_plain(leaf) or _stays(leaf) for leaf in tree_leaves(batch)):
            return move_to_device(batch, device)
        if self._stream is None or self._stream.device != device:
            self._stream = torch.Stream(device)
        current = torch.accelerator.current_stream(device)
        with self._stream:
            moved = move_to_device(batch, device)
        current.wait_stream(self._stream)
        for leaf in filter(_is_plain, tree_leaves(moved)):
            leaf.record_stream(current)  # the next batch must not get this memory during the computation
        return moved


def _stays(value: Any) -> bool:
    return not hasattr(value, "to") and not isinstance(value, Mapping | list | tuple)


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested
