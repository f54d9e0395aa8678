"""Publish the weights of a checkpoint alone, in a file with the digest of its content in its name."""

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from trainkit.projects.hooks.averaged import AVERAGED_PATH, averaged_weights

from trainkit.checkpoint.atomic import CheckpointError, replacing, sync_folder
from trainkit.checkpoint.file import read_file
from trainkit.checkpoint.format import format_of, make_format
from trainkit.checkpoint.state import plain_state

_logger = logging.getLogger(__name__)

_PUBLISHED = re.compile(r"(.+)_published(-[0-9a-f]{8})?\.(pth|safetensors)")


def publish_weights(
    path: str | os.PathLike[str],
    weights: Literal["model", "ema"] = "model",
    format: Literal["pth", "safetensors"] = "pth",
) -> str:
    """Write ``{"model": weights}`` of a checkpoint into the same folder: one plain file, also for a sharded checkpoint.

    The file is called ``<name>_published-<first 8 hex digits of its SHA-256>.pth``, which ``torch.hub`` verifies. Then
    older published files of the same checkpoint are removed. A run does not resume from such a file.

    Args:
        weights: "model", or "ema": the average of the `EMAHook`, and the model's own weights where nothing is averaged.
        format: "safetensors" writes only the tensors, by their names, to a file that ends in ``.safetensors``.

    Returns:
        Its path.

    Raises:
        CheckpointError: the checkpoint cannot be read or lacks these weights, or the file cannot be written.
    """
    folder, basename = os.path.split(os.path.abspath(path))
    name = basename.removesuffix(".pth")
    unnamed = Path(folder, f"{name}_published.{format}")
    state = read_file(path)
    state = format_of(state).fill(state, os.fspath(path), wanted=("model.", AVERAGED_PATH))
    try:
        chosen = plain_state(_choose(state, weights, path))
        if format == "safetensors":
            make_format("safetensors").write({"model": chosen}, str(unnamed))
        else:
            with replacing(str(unnamed)) as output:  # without the mark of a checkpoint: no run resumes from it
                torch.save({"model": chosen}, output)
    except TypeError as error:  # another program has written the file, or the format cannot store it
        raise CheckpointError(f"the weights of '{path}' cannot be published: {error}") from error
    digest = hashlib.sha256(unnamed.read_bytes()).hexdigest()
    published = os.path.join(folder, f"{name}_published-{digest[:8]}.{format}")
    os.replace(unnamed, published)
    sync_folder(folder)
    for other in os.listdir(folder):
        old, match = os.path.join(folder, other), _PUBLISHED.fullmatch(other)
        if match and match[1] == name and old != published:
            try:
                os.remove(old)
            except OSError as error:
                _logger.warning("Cannot remove the older published weights '%s': %s", old, error.strerror)
    return published


def _choose(state: dict[str, Any], weights: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    model = state.get("model")
    if not isinstance(model, Mapping):
        raise CheckpointError(f"'{path}' has no entry 'model' to publish; name another checkpoint")
    averaged = averaged_weights(state) if weights == "ema" else {}
    if averaged is None:
        raise CheckpointError(f"'{path}' holds no averaged weights; train with an EMAHook, or publish \"model\"")
    return {**model, **averaged}
