"""Keep the checkpoints of several best values, and publish weights with the digest of the file in its name."""

import contextlib
import hashlib
import logging
import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from trainkit.projects.hooks.averaging import AVERAGED_PATH, averaged_weights

from trainkit.checkpoint.atomic import replacing, sync_folder
from trainkit.checkpoint.errors import CheckpointError
from trainkit.checkpoint.file import plain_state, read_file
from trainkit.checkpoint.format import format_of, make_format
from trainkit.checkpoint.ranks import together
from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, SAVE_POINT, HookBase
from trainkit.engine.hooks.checkpoint import BestCheckpointer, PeriodicCheckpointer
from trainkit.engine.hooks.monitor import Mode
from trainkit.utils.periods import check_period

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class PublishWeights(HookBase):
    """After a run that has finished, publish the weights of its final checkpoint and of every best checkpoint.

    See `publish_weights` for the files. If publishing fails, the run fails on every rank; its checkpoints stay.
    ``weights``: "model", or "ema" for the average of an `EMAHook`. ``format``: "pth", or "safetensors", which needs
    that package.
    """

    priority = SAVE_POINT + 4  # after the last save
    ends = True
    config_keys = (("weights", "CHECKPOINT.PUBLISH"), ("format", "CHECKPOINT.PUBLISH_FORMAT"))

    def __init__(
        self,
        weights: Literal["", "model", "ema"] = "model",
        format: Literal["pth", "safetensors"] = "pth",
    ) -> None:
        if weights not in ("", "model", "ema") or format not in ("pth", "safetensors"):
            accepted = 'accepted are weights "model" or "ema", format "pth" or "safetensors"'
            raise ValueError(f"{accepted}; got {weights}, {format}")
        self._weights: Literal["model", "ema"] = weights or "model"
        self._format = format

    def before_train(self) -> None:
        """Raises ConfigError if there will be no average to publish."""
        has_average = any(type(hook).__name__ == "EMAHook" for hook in self.trainer.hooks)
        if self._weights == "ema" and not has_average:
            raise ConfigError(
                'weights is "ema", but no EMAHook is registered; add one, or publish "model"'
            )

    def after_train(self) -> None:
        if self.trainer.status == "finished":
            together(self._publish)

    def _publish(self) -> None:
        best = [hook for hook in self.trainer.hooks if isinstance(hook, BestCheckpointer)]
        for hook in best:
            self._publish_file(hook.checkpointer, f"{hook.file_prefix}.pth")
        for hook in self.trainer.hooks:
            if isinstance(hook, PeriodicCheckpointer) and hook.save_last:
                self._publish_file(hook.checkpointer, f"{hook.file_prefix}_final.pth")

    def _publish_file(self, checkpointer: Any, name: str) -> None:
        path = os.path.join(checkpointer.save_dir, name)
        # no best file: no finite value
        if not checkpointer.save_to_disk or not checkpointer.save_dir or not os.path.exists(path):
            return
        frozen = dict(checkpointer.model.named_parameters())
        published = publish_weights(path, self._weights, self._format, frozen)
        logger.info("Weights published as %s", published)


def publish_weights(
    path: str | os.PathLike[str],
    weights: Literal["model", "ema"] = "model",
    format: str = "pth",
    frozen: Mapping[str, Tensor] | None = None,
) -> str:
    """Write ``{"model": weights}`` of a checkpoint into the same folder: one plain file, also for a sharded checkpoint.

    The file, whose path is returned, is called ``<name>_published-<first 8 hex digits of its SHA-256>.pth``, which
    ``torch.hub`` verifies. A run does not resume from such a file. ``weights``: "model", or "ema": the average of the
    `EMAHook`, and the model's own weights where nothing is averaged. ``format``: "safetensors" writes only the tensors,
    by their names, to a file that ends in ``.safetensors``. ``frozen``: name -> weight of those that a checkpoint of
    CHECKPOINT.TRAINABLE_ONLY leaves out; without one of them it is a CheckpointError.
    """
    folder = Path(os.path.abspath(path)).parent
    name = Path(path).name.removesuffix(".pth")
    unnamed = folder / f"{name}_published.{format}"
    state = read_file(path)
    state = format_of(state).fill(state, os.fspath(path), wanted=("model.", AVERAGED_PATH))
    averaged = averaged_weights(state) if weights == "ema" else {}
    if not isinstance(state.get("model"), Mapping) or averaged is None:
        raise CheckpointError(
            f"'{path}' has no weights {weights!r} to publish; averages come from an EMAHook"
        )
    chosen = dict(state["model"])
    for key, average in averaged.items():
        if key in chosen:  # an average of 16-bit weights is in float32
            average = average.to(chosen[key].dtype)
        chosen[key] = average
    frozen = frozen or {}
    left_out = sorted(state.get("frozen_digests", {}).keys() - chosen.keys())
    absent = [key for key in left_out if key not in frozen]
    if absent:
        raise CheckpointError(
            f"'{path}' leaves out {len(absent)} frozen weights, such as {absent[0]!r}; pass "
            "`frozen`"
        )
    try:
        for key in left_out:
            chosen[key] = frozen[key].detach().cpu()
        chosen = plain_state(chosen)
        if format == "safetensors":
            make_format("safetensors").write({"model": chosen}, str(unnamed))
        else:
            # without the mark of a checkpoint: no run resumes from it
            with replacing(str(unnamed)) as output:
                torch.save({"model": chosen}, output)
    # another program has written the file, or the format cannot store it
    except TypeError as error:
        raise CheckpointError(f"the weights of '{path}' cannot be published: {error}") from error
    digest = hashlib.sha256(unnamed.read_bytes()).hexdigest()[:8]
    published = folder / f"{name}_published-{digest}.{format}"
    os.replace(unnamed, published)
    sync_folder(str(folder))
    return str(published)


@HOOK_REGISTRY.register()
class BestCheckpoints(BestCheckpointer):
    """`BestCheckpointer` that also keeps the ``num_to_keep`` best values, as ``<file_prefix>_<iteration>``.

    Of equal values the earlier one is better. It needs a trainkit checkpointer.
    """

    _state_names = (*BestCheckpointer._state_names, "_kept")

    def __init__(
        self,
        eval_period: int,
        checkpointer: Any,
        val_metric: str,
        mode: Mode = "auto",
        file_prefix: str = "model_best",
        *,
        num_to_keep: int = 2,
    ) -> None:
        super().__init__(eval_period, checkpointer, val_metric, mode, file_prefix)
        self._num_to_keep = check_period("num_to_keep", num_to_keep, minimum=1)

    def _forget(self) -> None:
        super()._forget()
        # [name, value] of numbered files, the best first; on rank 0
        self._kept: list[list[Any]] = []

    def judge(self, value: float) -> list[str]:
        names = super().judge(value)
        if math.isfinite(value):
            name = f"{self.file_prefix}_{self.trainer.done - 1:07d}"
            others = [other for other in self._kept if other[0] != name]
            candidates = [*others, [name, value]]
            best_first = sorted(candidates, key=lambda kept: -self._sign * kept[1])
            self._kept = best_first[: self._num_to_keep]
            if [name, value] in self._kept:
                names = [name, *names]
        return names

    def _save_untagged(self, name: str, iteration: int, **entries: Any) -> None:
        if name == self.file_prefix or self.not_better > 0:  # the last one of this evaluation
            entries["on_commit"] = partial(self._remove, self._state_before.get("kept", []))
        super()._save_untagged(name, iteration, **entries)

    def _remove(self, entries: list[list[Any]]) -> None:
        for entry in entries:
            if entry not in self._kept:
                with contextlib.suppress(OSError):  # a file that stays only costs space
                    self.checkpointer.remove(entry[0])

    def undo(self) -> None:
        tried = self._kept
        super().undo()
        self._remove(tried)  # those whose file was not written
