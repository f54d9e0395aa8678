"""Pictures and texts that are made when they are needed: nothing is read from a disk or from the network."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainkit.config import CfgNode
from trainkit.data import TRANSFORM_REGISTRY, DatasetCatalog, MetadataCatalog

SIZE = 32  # width and height of a picture, in pixels
LENGTH = 24  # tokens of a text
VOCABULARY = 42
CLASS_NAMES = ("disc", "square", "stripes")
TEXT_CLASS_NAMES = ("low", "middle", "high")


class Shapes(Dataset[dict[str, Any]]):
    """Noisy pictures of a disc, a square or stripes in a random color, at a random place.

    A sample is a dict with ``image``, uint8 ``[32, 32, 3]`` as from a file, and ``label``, 0 to 2.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples = num_samples
        self._seed = seed

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = _generator(self._seed, index, len(self))
        label = index % len(CLASS_NAMES)
        x, y = rng.integers(10, SIZE - 10, 2)
        radius = int(rng.integers(5, 10))
        is_inside = _shape(CLASS_NAMES[label], x, y, radius)
        paper = rng.normal(80, 20, (SIZE, SIZE, 3))
        color = rng.uniform(60, 140, 3)
        picture = paper + is_inside[:, :, None] * color
        return {"image": picture.clip(0, 255).astype(np.uint8), "label": label}


def _shape(name: str, x: int, y: int, radius: int) -> np.ndarray:
    """Whether each pixel is in the shape, bool ``[32, 32]``."""
    rows, columns = np.mgrid[:SIZE, :SIZE]
    if name == "disc":
        return (rows - y) ** 2 + (columns - x) ** 2 < radius**2
    if name == "square":
        return np.maximum(abs(rows - y), abs(columns - x)) < radius
    return (rows + x) % radius < radius // 2


class Texts(Dataset[dict[str, Any]]):
    """Token sequences that repeat a piece of 2 to 5 tokens, all of them from the same third of the vocabulary.

    A sample is a dict with ``input_ids``, int64 ``[24]``, and ``label``, the number of this third. With
    ``for_language_model`` it has ``labels`` ``[24]`` instead, which are the ``input_ids``: a causal language model of
    Hugging Face shifts them itself. No text is in datasets of an even and of an odd seed.
    """

    def __init__(self, num_samples: int, seed: int, *, for_language_model: bool = False) -> None:
        self._num_samples = num_samples
        self._seed = seed
        self._for_language_model = for_language_model

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = _generator(self._seed, index, len(self))
        label = index % len(TEXT_CLASS_NAMES)
        third = VOCABULARY // len(TEXT_CLASS_NAMES)
        while True:
            length = rng.integers(2, 6)
            piece = label * third + rng.choice(third, length, replace=False)
            if piece.sum() % 2 == self._seed % 2:
                break
        tokens = torch.from_numpy(np.resize(piece, LENGTH).astype(np.int64))
        if self._for_language_model:
            return {"input_ids": tokens, "labels": tokens}
        return {"input_ids": tokens, "label": label}


def _generator(seed: int, index: int, num_samples: int) -> np.random.Generator:
    if not 0 <= index < num_samples:
        raise IndexError(f"there are {num_samples} samples, got index {index}")
    return np.random.default_rng([seed, index])


@TRANSFORM_REGISTRY.register()
class ToImage:
    """A picture, uint8 ``[H, W, 3]``, as float32 ``[3, H, W]`` around 0; the rest of the sample stays."""

    def __init__(self, cfg: CfgNode | None = None) -> None:
        pass

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        picture = torch.from_numpy(np.array(sample["image"]))
        image: Tensor = picture.permute(2, 0, 1) / 127.5 - 1
        return {**sample, "image": image}


def _register(split: str, num_samples: int, seed: int) -> None:
    make_shapes = partial(Shapes, num_samples, seed)
    DatasetCatalog.register(f"shapes_{split}", make_shapes)
    metadata = MetadataCatalog.get(f"shapes_{split}")
    metadata.set(class_names=list(CLASS_NAMES))

    make_texts = partial(Texts, num_samples, seed)
    DatasetCatalog.register(f"texts_{split}", make_texts)
    metadata = MetadataCatalog.get(f"texts_{split}")
    metadata.set(class_names=list(TEXT_CLASS_NAMES))

    make_texts_of_lm = partial(make_texts, for_language_model=True)
    DatasetCatalog.register(f"lm_texts_{split}", make_texts_of_lm)


_register("train", num_samples=4800, seed=0)
_register("test", num_samples=120, seed=1)
