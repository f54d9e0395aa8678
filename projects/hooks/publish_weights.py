"""Publish the weights of a checkpoint alone, in a file with the digest of its content in its name."""

import logging
import os
from collections.abc import Mapping
from typing import Any, Literal

from trainkit.projects.hooks.averaged import AVERAGED_PATH, averaged_weights

from trainkit.checkpoint.atomic import CheckpointError, sync_folder
from trainkit.checkpoint.file import SAFETENSORS_SUFFIX, SUFFIX, sha256_of, write_file, write_safetensors
from trainkit.checkpoint.folder import PUBLISHED
from trainkit.checkpoint.format import read_whole

_logger = logging.getLogger(__name__)


def publish_weights(
    path: str | os.PathLike[str],
    weights: Literal["model", "ema"] = "model",
    format: Literal["pth", "safetensors"] = "pth",
) -> str:
    """Write ``{"model": weights}`` of a checkpoint into the same folder: one plain file, also for a sharded checkpoint.

    The file is called ``<name>_published-<first 8 hex digits of its SHA-256>.pth``, which ``torch.hub`` verifies. Then
    older published files of the same checkpoint are removed. A run cannot resume from such a file.

    Args:
        weights: "model", or "ema": the average of the `EMAHook`, and the model's own weights where nothing is averaged.
        format: "safetensors" writes only the tensors, by their names, to a file that ends in ``.safetensors``.

    Returns:
        Its path.

    Raises:
        CheckpointError: the checkpoint cannot be read or lacks these weights, or the file cannot be written.
    """
    path = os.fspath(path)
    folder, basename = os.path.split(os.path.abspath(path))
    name = basename.removesuffix(SUFFIX)
    suffix = SAFETENSORS_SUFFIX if format == "safetensors" else SUFFIX
    unnamed = os.path.join(folder, f"{name}_published{suffix}")
    state = read_whole(path, wanted=("model.", AVERAGED_PATH))
    chosen = _choose(state, weights, path)
    try:
        if format == "safetensors":
            write_safetensors(chosen, unnamed)
        else:
            write_file({"model": chosen}, unnamed)
    except TypeError as error:  # another program has written the file, or the format cannot store it
        raise CheckpointError(f"the weights of '{path}' cannot be published: {error}") from error
    published = os.path.join(folder, f"{name}_published-{sha256_of(unnamed)[:8]}{suffix}")
    os.replace(unnamed, published)
    sync_folder(folder)
    for other in os.listdir(folder):
        old, match = os.path.join(folder, other), PUBLISHED.fullmatch(other)
        if match and match[1] == name and old != published:
            try:
                os.remove(old)
            except OSError as error:
                _logger.warning("Cannot remove the older published weights '%s': %s", old, error.strerror)
    return published


def _choose(state: dict[str, Any], weights: str, path: str) -> dict[str, Any]:
    model = state.get("model")
    if not isinstance(model, Mapping):
        raise CheckpointError(f"'{path}' has no entry 'model', so there is nothing to publish; name another checkpoint")
    averaged = averaged_weights(state) if weights == "ema" else {}
    if averaged is None:
        raise CheckpointError(f"'{path}' holds no averaged weights; train with an EMAHook, or publish \"model\"")
    return {**model, **averaged}
