"""The scans with their split, and the transforms that turn them into inputs of the model."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from trainkit.config import CfgNode
from trainkit.data import TRANSFORM_REGISTRY, DatasetCatalog, MetadataCatalog

_FILE = Path(__file__).with_name("digits.npz")
_SPLITS = ("train", "val", "test")  # a sample's split in the file is an index into this


def load_split(split: str) -> list[dict[str, Any]]:
    """The samples of "train", "val" or "test", in the order of the source.

    Returns:
        Dicts with ``image``, uint8 ``[8, 8]`` from 0 (paper) to 16 (ink), and ``label``, 0 to 9.
    """
    with np.load(_FILE) as arrays:
        is_chosen = arrays["split"] == _SPLITS.index(split)
        images = arrays["images"][is_chosen]
        labels = arrays["labels"][is_chosen]
    samples = []
    for image, label in zip(images, labels, strict=True):
        samples.append({"image": image, "label": int(label)})
    return samples


@TRANSFORM_REGISTRY.register()
class DigitsTransform:
    """Turns a scan, uint8 ``[8, 8]``, into float32 ``[1, 8, 8]`` in [0, 1]; the rest of the sample does not change."""

    def __init__(self, cfg: CfgNode | None = None) -> None:
        pass

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        scan = torch.from_numpy(sample["image"]).to(torch.float32)
        return {**sample, "image": scan[None] / 16}


@TRANSFORM_REGISTRY.register()
class DigitsTrainTransform(DigitsTransform):
    """`DigitsTransform` with small random rotation, scaling, shear and shift, drawn from torch's global generator."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        sample = super().__call__(sample)
        images = sample["image"][None]  # a batch of one
        draws = (2 * torch.rand(6) - 1).tolist()
        # up to 10 degrees, a tenth of the size, and half a pixel
        matrix = affine_matrix(draws, math.radians(10), 0.1, 0.1, 0.125)
        size = [*images.shape]
        grid = F.affine_grid(torch.tensor([matrix]), size, align_corners=False)
        moved = F.grid_sample(images, grid, align_corners=False)
        return {**sample, "image": moved[0]}


def affine_matrix(
    draws: Sequence[float], rotation: float, scaling: float, shear: float, shift: float
) -> list[list[float]]:
    """The matrix of an affine map from six numbers in [-1, 1).

    Args:
        rotation: the largest one, in radians.
        scaling: the largest change of the size per axis.
        shift: the largest one, as a fraction of half the width.
    """
    turn, scale_x, scale_y, slant, shift_x, shift_y = draws
    cos = math.cos(rotation * turn)
    sin = math.sin(rotation * turn)
    size_x = 1 + scaling * scale_x
    size_y = 1 + scaling * scale_y
    row_x = [cos * size_x, (shear * slant - sin) * size_x, shift * shift_x]
    row_y = [sin * size_y, cos * size_y, shift * shift_y]
    return [row_x, row_y]


for _split in _SPLITS:
    _name = f"digits_{_split}"
    DatasetCatalog.register(_name, partial(load_split, _split))
    MetadataCatalog.get(_name).set(class_names=[str(digit) for digit in range(10)])
