"""Pictures of the model's outputs."""

import importlib
import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.evaluation.observer import Phase
from trainkit.utils import comm
from trainkit.utils.env import preserve_rng_state
from trainkit.utils.errors import look_up
from trainkit.utils.periods import check_period, is_nth
from trainkit.utils.registry import Registry

logger = logging.getLogger(__name__)

VISUALIZER_REGISTRY = Registry("VISUALIZER")
"""Functions that DRAW of a `VisualizationHook` can name: ``(inputs, outputs)`` -> images."""


@HOOK_REGISTRY.register()
class VisualizationHook(HookBase):
    """Draw every ``period``-th batch of each evaluation, into PNG files and into the storage for TensorBoard.

    The files are ``<output_dir>/<phase>/<dataset>_iter0000099_batch0003.png``. If ``draw`` returns several images for a
    batch, the names also have ``_0``, ``_1``, ... or the ``names`` of the images. Ranks other than 0 draw their own
    batches and add ``_rank1`` and so on. If a file cannot be written, an error is logged and the evaluation continues.
    If an `EMAHook` evaluates both weights, the files show the model's own weights, because they are evaluated last.

    Args:
        draw: a function, or its name in `VISUALIZER_REGISTRY`. It gets a batch and the model's outputs for it, both on
            the model's device, and returns an RGB image or a list of them: array or tensor, shape ``[H, W, 3]``, uint8.
            Random state is restored after it. ``options`` are further arguments, by name.
        output_dir: default is ``visualization`` in the OUTPUT_DIR of the trainer's config.
        phases: which evaluations are drawn.
        names: the key under which a batch, or each of its samples, has names or file names. The images that ``draw``
            returns must then belong to the first samples of the batch.
    """

    def __init__(
        self,
        draw: Callable[..., Any] | str,
        period: int = 50,
        output_dir: str | Path | None = None,
        *,
        phases: Literal["val", "test", "both"] = "both",
        names: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if phases not in ("val", "test", "both"):
            raise ValueError(f'phases must be "val", "test" or "both", got {phases!r}')
        function: Any = draw
        if isinstance(draw, str):
            function = look_up(VISUALIZER_REGISTRY, draw, "draw")
        arguments = {name.lower(): value for name, value in (options or {}).items()}
        self._draw = partial(function, **arguments)
        self._phases = phases
        self._names = names
        self._output_dir = output_dir
        self._period = check_period("period", period, minimum=1)

    @property
    def _folder(self) -> Path:
        return Path(self._output_dir or Path(self.trainer.cfg.OUTPUT_DIR, "visualization"))

    def before_train(self) -> None:
        # without a config and output_dir the error comes now, not at the first evaluation
        assert self._folder

    def before_eval(self, phase: Phase, name: str) -> None:
        self._dataset = re.sub(r"[^\w.-]", "_", name or "unnamed")

    def after_eval_step(self, phase: Phase, index: int, inputs: Any, outputs: Any) -> None:
        if not is_nth(index + 1, self._period) or self._phases not in (phase, "both"):
            return
        with preserve_rng_state():
            drawn = self._draw(inputs, outputs)
        if not isinstance(drawn, list | tuple):
            drawn = [drawn]
        images = [_as_array(image) for image in drawn]
        for image, name in zip(images, self._names_of(inputs, len(images)), strict=True):
            self._keep(image, phase, f"batch{index:04d}{name}")

    def _keep(self, image: np.ndarray, phase: Phase, name: str) -> None:
        """Write an image to its file, and put it into the storage."""
        rank = f"_rank{comm.get_rank()}" if comm.get_rank() else ""
        file = f"{self._dataset}_iter{self.trainer.iter:07d}_{name}{rank}.png"
        path = self._folder / phase / file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            importlib.import_module("PIL.Image").fromarray(image).save(path)
        except OSError as error:
            logger.error("Cannot write the picture '%s': %s", path, error.strerror or error)
        tensor = torch.from_numpy(image).permute(2, 0, 1)
        self.trainer.storage_in_use().put_image(f"{phase}/{self._dataset}_{name}", tensor)

    def _names_of(self, inputs: Any, count: int) -> list[str]:
        if self._names is None:
            return [f"_{i}" for i in range(count)] if count > 1 else [""] * count
        if isinstance(inputs, list | tuple):
            given = [sample[self._names] for sample in inputs]
        else:
            given = inputs[self._names]
        names = []
        for path in given[:count]:
            name = Path(str(path)).name
            name = re.sub(r"\.(png|jpe?g|bmp|tiff?|webp)$", "", name)
            name = re.sub(r"[^\w.-]", "_", name)
            names.append(f"_{name}")
        return names


def _as_array(image: Any) -> np.ndarray:
    """A copy in host memory: ``draw`` may use its array again before a writer reads the image."""
    if isinstance(image, torch.Tensor):
        image = image.numpy(force=True)
    array = np.array(image)
    if array.dtype != np.uint8 or array.shape[2:] != (3,) or 0 in array.shape:
        raise TypeError(
            f"draw must return images of shape [H, W, 3], uint8, got {array.shape}, {array.dtype}"
        )
    return array
