"""Canvases of several scans of digits, and the class of each pixel."""

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from projects.digits import load_split
from trainkit.data import DatasetCatalog, MetadataCatalog

CLASS_NAMES = ("paper", *(str(digit) for digit in range(10)))
CANVAS_SIZE = 48
NUM_CANVASES = {"train": 20_000, "val": 200, "test": 500}

_SIZES = (16, 24)  # smallest and largest digit, in pixels
_IS_INK = 0.4  # pixels darker than this fraction of full ink are labelled as the digit
_NUM_TRIES = 8  # tries to place a digit; if it always touches another digit, it is left out
_NUM_STROKES = 6  # strokes of clutter
_STROKE_LENGTH = (3, 14)
_INK = (0.8, 1.0)
_SHADING = 0.1  # largest difference between the middle of the paper and its edge
_NOISE = 0.05


class DigitCanvases(Dataset[dict[str, Any]]):
    """Digits of different sizes and darkness on shaded, noisy paper with strokes of clutter in between.

    A sample is a dict with ``image``, float32 ``[1, 48, 48]``, and ``label``, int64 ``[48, 48]``: 0 for paper and
    clutter, digit + 1 for ink. It depends only on split, seed and index.

    Args:
        split: the split of the scans: "train", "val" or "test".
    """

    def __init__(self, split: str, num_canvases: int, seed: int = 0) -> None:
        self._scans = load_split(split)
        self._num_canvases = num_canvases
        self._key = (seed, *split.encode())

    def __len__(self) -> int:
        return self._num_canvases

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} canvases, got index {index}")
        rng = np.random.default_rng((*self._key, index))
        image, label = self._place_digits(rng)
        for _ in range(_NUM_STROKES):
            np.maximum(image, _stroke(rng), out=image)
        shading = _shading(rng)
        noise = rng.normal(0, _NOISE, image.shape)
        image += shading + noise
        tensor = torch.from_numpy(image.astype(np.float32))
        return {"image": tensor[None], "label": torch.from_numpy(label)}

    def _place_digits(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        image = np.zeros((CANVAS_SIZE, CANVAS_SIZE))
        label = np.zeros((CANVAS_SIZE, CANVAS_SIZE), np.int64)
        smallest, largest = _SIZES
        for _ in range(_NUM_TRIES):
            scan = self._scans[rng.integers(len(self._scans))]
            size = int(rng.integers(smallest, largest, endpoint=True))
            top, left = rng.integers(CANVAS_SIZE - size, size=2, endpoint=True)
            # views of the place of the digit
            image_there = image[top : top + size, left : left + size]
            label_there = label[top : top + size, left : left + size]
            if label_there.any():
                continue
            ink = _enlarge(scan["image"] / 16, size)
            darkness = rng.uniform(*_INK)
            np.maximum(image_there, ink * darkness, out=image_there)
            label_there[ink > _IS_INK] = 1 + scan["label"]
        return image, label


def _enlarge(scan: np.ndarray, size: int) -> np.ndarray:
    """Bilinear interpolation."""
    weights = _weights(len(scan), size)
    return weights @ scan @ weights.T


@cache
def _weights(old: int, new: int) -> np.ndarray:
    """``[new, old]``: each new pixel is a weighted mean of the two old pixels with the nearest centres."""
    middles = (np.arange(new) + 0.5) * old / new - 0.5
    middles = np.clip(middles, 0, old - 1)
    distances = np.abs(middles[:, None] - np.arange(old))
    return np.clip(1 - distances, 0, None)


_ROWS, _COLUMNS = np.mgrid[:CANVAS_SIZE, :CANVAS_SIZE]


def _stroke(rng: np.random.Generator) -> np.ndarray:
    """A straight stroke, one or two pixels wide."""
    row, column = rng.uniform(0, CANVAS_SIZE, 2)
    angle = rng.uniform(0, np.pi)
    length = rng.uniform(*_STROKE_LENGTH)
    half_width = rng.uniform(0.5, 1)
    sin = np.sin(angle)
    cos = np.cos(angle)
    # of each pixel from the start of the stroke
    rows = _ROWS - row
    columns = _COLUMNS - column
    along = np.clip(rows * sin + columns * cos, 0, length)
    distance = np.hypot(rows - along * sin, columns - along * cos)
    covered = np.clip(half_width + 0.5 - distance, 0, 1)
    return covered * rng.uniform(*_INK)


def _shading(rng: np.random.Generator) -> np.ndarray:
    slope_down, slope_right = rng.uniform(-_SHADING, _SHADING, 2) / (CANVAS_SIZE / 2)
    middle = CANVAS_SIZE / 2
    return slope_down * (_ROWS - middle) + slope_right * (_COLUMNS - middle)


for _split, _num in NUM_CANVASES.items():
    _name = f"canvases_{_split}"
    DatasetCatalog.register(_name, partial(DigitCanvases, _split, _num))
    MetadataCatalog.get(_name).set(class_names=list(CLASS_NAMES))
