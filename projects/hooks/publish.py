"""Weights for other people, written after a run."""

import logging
import os
from collections.abc import Iterator
from typing import Any, Literal

from trainkit.projects.hooks.publish_weights import publish_weights

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.ranks import together
from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, SAVE_POINT, HookBase
from trainkit.engine.hooks.checkpoint import BestCheckpointer, PeriodicCheckpointer

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class PublishWeights(HookBase):
    """After a run that has finished, publish the weights of its final checkpoint and of every best checkpoint.

    See `publish_weights` for the files. If publishing fails, the run fails on every rank; its checkpoints stay.

    Args:
        weights: "model", or "ema" for the average of an `EMAHook`.
        format: "pth", or "safetensors", which needs that package.
    """

    priority = SAVE_POINT + 4  # after the last save
    ends = True
    config_keys = (("weights", "CHECKPOINT.PUBLISH"), ("format", "CHECKPOINT.PUBLISH_FORMAT"))

    def __init__(
        self, weights: Literal["", "model", "ema"] = "model", format: Literal["pth", "safetensors"] = "pth"
    ) -> None:
        if weights not in ("", "model", "ema") or format not in ("pth", "safetensors"):
            raise ValueError(
                f'accepted are weights "model" or "ema", format "pth" or "safetensors"; got {weights}, {format}'
            )
        self._weights: Literal["model", "ema"] = weights or "model"
        self._format: Literal["pth", "safetensors"] = format

    def before_train(self) -> None:
        """Raises ConfigError if there will be no average to publish."""
        if self._weights == "ema" and all(type(hook).__name__ != "EMAHook" for hook in self.trainer.hooks):
            raise ConfigError('weights is "ema", but no EMAHook is registered; add one, or publish "model"')

    def after_train(self) -> None:
        if self.trainer.status == "finished":
            try:
                together(self._publish)
            except CheckpointError as error:
                raise CheckpointError(f"weights could not be published: {error}") from error

    def _publish(self) -> None:
        for checkpointer, name in self._checkpoints():
            if checkpointer.save_to_disk and checkpointer.save_dir:
                path = os.path.join(checkpointer.save_dir, f"{name}.pth")
                if os.path.exists(path):
                    logger.info("Weights published as %s", publish_weights(path, self._weights, self._format))
                else:
                    logger.warning("There is no '%s' to publish: no value of its metric was finite", path)

    def _checkpoints(self) -> Iterator[tuple[Any, str]]:
        for hook in self.trainer.hooks:
            if isinstance(hook, PeriodicCheckpointer) and hook.save_last:
                yield hook.checkpointer, f"{hook.file_prefix}_final"
            elif isinstance(hook, BestCheckpointer):
                yield hook.checkpointer, hook.file_prefix
