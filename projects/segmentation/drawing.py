"""Input, truth and prediction side by side."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainkit.engine.hooks import VISUALIZER_REGISTRY

PALETTE = torch.tensor(
    [
        (255, 255, 255),  # paper
        (230, 25, 75),
        (245, 130, 48),
        (255, 200, 0),
        (120, 200, 40),
        (0, 130, 70),
        (0, 190, 200),
        (0, 110, 220),
        (90, 40, 180),
        (220, 80, 220),
        (110, 60, 20),
    ],
    dtype=torch.uint8,
)
"""The colour of each class, RGB ``[11, 3]``."""

_NUM_ROWS = 4
_ENLARGED = 3


@VISUALIZER_REGISTRY.register()
def draw_segmentation(
    inputs: dict[str, Tensor],
    outputs: Tensor,
    *,
    palette: Sequence[Sequence[int]] | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """The first four canvases of a batch, one below the other; in each row image, labels and prediction.

    Args:
        inputs: with ``image`` ``[N, 1, H, W]`` and ``label`` ``[N, H, W]``.
        outputs: logits ``[N, C, H, W]``.
        palette: the colour of each class, RGB from 0 to 255; default is `PALETTE`.
        alpha: the weight of the colours: 0 shows only the image, 1 only the colours.

    Returns:
        RGB, uint8, on the CPU, each pixel three times as large.
    """
    image = inputs["image"][:_NUM_ROWS, 0].cpu()
    gray = (255 * (1 - image)).clamp(0, 255).to(torch.uint8)
    paper = gray[..., None].expand(-1, -1, -1, 3)
    colours = PALETTE
    if palette is not None:
        colours = torch.tensor(palette, dtype=torch.uint8)
    truth = inputs["label"][:_NUM_ROWS].cpu()
    prediction = outputs[:_NUM_ROWS].argmax(dim=1).cpu()
    columns = [paper]
    for label in (truth, prediction):
        mixed = torch.lerp(paper.float(), colours[label].float(), alpha)
        columns.append(mixed.round().to(torch.uint8))
    rows = torch.cat(columns, dim=2).flatten(0, 1)
    return rows.repeat_interleave(_ENLARGED, 0).repeat_interleave(_ENLARGED, 1)
