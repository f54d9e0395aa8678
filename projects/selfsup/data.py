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

LABELLED = 0
UNLABELLED = 1
EVALUATED = 2
"""The values of ``part`` in a sample of an evaluation dataset."""

_MAX_CONTRAST = 0.2
_NOISE = 0.05


def load_unlabeled() -> list[dict[str, Any]]:
    """The training scans: dicts with ``image``, uint8 ``[8, 8]`` from 0 to 16, and ``index``, the scan's number."""
    samples = []
    for index, sample in enumerate(load_split("train")):
        samples.append({"image": sample["image"], "index": index})
    return samples


def load_frozen(split: str) -> list[dict[str, Any]]:
    """The training scans and those of ``split``, with ``label`` and ``part``, see `LABELLED`.

    Unlabelled scans come last, because they only add neighbours, and a trial run uses only the first few hundred scans.
    """
    num_seen: Counter[int] = Counter()  # of each class
    labelled: list[dict[str, Any]] = []
    unlabelled: list[dict[str, Any]] = []
    for sample in load_split("train"):
        label = sample["label"]
        if num_seen[label] < NUM_LABELLED:
            labelled.append({**sample, "part": LABELLED})
        else:
            unlabelled.append({**sample, "part": UNLABELLED})
        num_seen[label] += 1
    evaluated = [{**sample, "part": EVALUATED} for sample in load_split(split)]
    return labelled + evaluated + unlabelled


@TRANSFORM_REGISTRY.register()
class TwoViews(DigitsTransform):
    """Two random views of a scan, ``view1`` and ``view2``, float32 ``[1, 8, 8]``, in place of its ``image``.

    Each view has a random rotation, scaling, shear, shift, contrast and noise, drawn from torch's global generator.
    """

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        sample = super().__call__(sample)
        image = sample.pop("image")
        draws = (2 * torch.rand(2, 7) - 1).tolist()
        matrices = []
        contrasts = []
        for of_view in draws:
            # up to 15 degrees, and 0.8 pixels
            matrices.append(affine_matrix(of_view[:6], math.radians(15), 0.15, 0.2, 0.2))
            contrasts.append(1 + _MAX_CONTRAST * of_view[6])
        size = [2, *image.shape]
        grid = F.affine_grid(torch.tensor(matrices), size, align_corners=False)
        views = F.grid_sample(image.expand(size), grid, align_corners=False)
        contrast = torch.tensor(contrasts).view(2, 1, 1, 1)
        noise = _NOISE * torch.randn(size)
        view1, view2 = views * contrast + noise
        return {**sample, "view1": view1, "view2": view2}


DatasetCatalog.register("digits_unlabeled", load_unlabeled)
for _split in ("val", "test"):
    _name = f"digits_frozen_{_split}"
    DatasetCatalog.register(_name, partial(load_frozen, _split))
    MetadataCatalog.get(_name).set(class_names=[str(digit) for digit in range(10)])
