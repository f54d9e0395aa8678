"""Publish the weights of a checkpoint alone, in a file with the digest of its content in its name."""

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from trainkit.projects.hooks.averaging import AVERAGED_PATH, averaged_weights

from trainkit.checkpoint.atomic import CheckpointError, replacing, sync_folder
from trainkit.checkpoint.file import plain_state, read_file
from trainkit.checkpoint.format import format_of, make_format
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
            accepted = 'accepted are weights "model" or "ema", format "pth" or "safetensors"'
            raise ValueError(f"{accepted}; got {weights}, {format}")
        self._arguments: Any = weights or "model", format

    def before_train(self) -> None:
        """Raises ConfigError if there will be no average to publish."""
        if self._arguments[0] == "ema" and all(type(hook).__name__ != "EMAHook" for hook in self.trainer.hooks):
            raise ConfigError('weights is "ema", but no EMAHook is registered; add one, or publish "model"')

    def after_train(self) -> None:
        if self.trainer.status == "finished":
            together(self._publish)

    def _publish(self) -> None:
        hooks: list[Any] = [hook for hook in self.trainer.hooks if isinstance(hook, BestCheckpointer)]
        hooks += [hook for hook in self.trainer.hooks if isinstance(hook, PeriodicCheckpointer) and hook.save_last]
        for hook in hooks:
            folder, suffix = hook.checkpointer.save_dir, "" if isinstance(hook, BestCheckpointer) else "_final"
            path = os.path.join(folder, f"{hook.file_prefix}{suffix}.pth")
            if hook.checkpointer.save_to_disk and folder and os.path.exists(path):  # no best file: no finite value
                logger.info("Weights published as %s", publish_weights(path, *self._arguments))


def publish_weights(
    path: str | os.PathLike[str], weights: Literal["model", "ema"] = "model", format: str = "pth"
) -> str:
    """Write ``{"model": weights}`` of a checkpoint into the same folder: one plain file, also for a sharded checkpoint.

    The file, whose path is returned, is called ``<name>_published-<first 8 hex digits of its SHA-256>.pth``, which
    ``torch.hub`` verifies. A run does not resume from such a file.

    Args:
        weights: "model", or "ema": the average of the `EMAHook`, and the model's own weights where nothing is averaged.
        format: "safetensors" writes only the tensors, by their names, to a file that ends in ``.safetensors``.
    """
    folder, name = Path(os.path.abspath(path)).parent, Path(path).name.removesuffix(".pth")
    unnamed = folder / f"{name}_published.{format}"
    state = read_file(path)
    state = format_of(state).fill(state, os.fspath(path), wanted=("model.", AVERAGED_PATH))
    averaged = averaged_weights(state) if weights == "ema" else {}
    if not isinstance(state.get("model"), Mapping) or averaged is None:
        raise CheckpointError(f"'{path}' has no weights {weights!r} to publish; averages come from an EMAHook")
    try:
        chosen = plain_state({**state["model"], **averaged})
        if format == "safetensors":
            make_format("safetensors").write({"model": chosen}, str(unnamed))
        else:
            with replacing(str(unnamed)) as output:  # without the mark of a checkpoint: no run resumes from it
                torch.save({"model": chosen}, output)
    except TypeError as error:  # another program has written the file, or the format cannot store it
        raise CheckpointError(f"the weights of '{path}' cannot be published: {error}") from error
    published = folder / f"{name}_published-{hashlib.sha256(unnamed.read_bytes()).hexdigest()[:8]}.{format}"
    os.replace(unnamed, published)
    sync_folder(str(folder))
    return str(published)
