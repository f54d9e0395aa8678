"""Scans without labels, two random views of each, and the datasets on which frozen features are evaluated."""

import math
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from projects.digits import DigitsTransform, load_split
from projects.digits.data import affine_matrix
from trainkit.data import TRANSFORM_REGISTRY, DatasetCatalog, MetadataCatalog

NUM_LABELLED = 10
"""Training scans per class whose labels the linear probe sees: the first ones in the order of the source."""

LABELLED, UNLABELLED, EVALUATED = range(3)
"""The values of ``part`` in a sample of an evaluation dataset."""

_MAX_CONTRAST = 0.2
_NOISE = 0.05


def load_unlabeled() -> list[dict[str, Any]]:
    """The training scans: dicts with ``image``, uint8 ``[8, 8]`` from 0 to 16, and ``index``, the scan's number."""
    return [
        {"image": sample["image"], "index": index}
        for index, sample in enumerate(load_split("train"))
    ]


def load_frozen(split: str) -> list[dict[str, Any]]:
    """The training scans and those of ``split``, with ``label`` and ``part``, see `LABELLED`.

    Unlabelled scans come last, because they only add neighbours, and a trial run uses only the first few hundred scans.
    """
    seen: Counter[int] = Counter()
    by_part: dict[int, list[dict[str, Any]]] = {LABELLED: [], UNLABELLED: []}
    for sample in load_split("train"):
        part = LABELLED if seen[sample["label"]] < NUM_LABELLED else UNLABELLED
        seen[sample["label"]] += 1
        by_part[part].append(sample | {"part": part})
    evaluated = [sample | {"part": EVALUATED} for sample in load_split(split)]
    return by_part[LABELLED] + evaluated + by_part[UNLABELLED]


@TRANSFORM_REGISTRY.register()
class TwoViews(DigitsTransform):
    """Two random views of a scan, ``view1`` and ``view2``, float32 ``[1, 8, 8]``, in place of its ``image``.

    Each view has a random rotation, scaling, shear, shift, contrast and noise, drawn from torch's global generator.
    """

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        sample = super().__call__(sample)
        image = sample.pop("image")
        draws = (2 * torch.rand(2, 7) - 1).tolist()
        size = [2, *image.shape]
        # up to 15 degrees, and 0.8 pixels
        matrices = [affine_matrix(draw[:6], math.radians(15), 0.15, 0.2, 0.2) for draw in draws]
        grid = F.affine_grid(torch.tensor(matrices), size, align_corners=False)
        views = F.grid_sample(image.expand(size), grid, align_corners=False)
        contrast = torch.tensor([1 + _MAX_CONTRAST * draw[6] for draw in draws]).view(2, 1, 1, 1)
        view1, view2 = views * contrast + _NOISE * torch.randn(size)
        return sample | {"view1": view1, "view2": view2}


DatasetCatalog.register("digits_unlabeled", load_unlabeled)
for _split in ("val", "test"):
    DatasetCatalog.register(f"digits_frozen_{_split}", partial(load_frozen, _split))
    MetadataCatalog.get(f"digits_frozen_{_split}").set(
        class_names=[str(digit) for digit in range(10)]
    )
