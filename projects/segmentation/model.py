"""Three small networks: U-Net, FCN and ViT."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from projects.segmentation.data import CANVAS_SIZE, CLASS_NAMES
from trainkit.config import CfgNode, ConfigError, configurable
from trainkit.modeling import MODEL_REGISTRY

PATCH_SIZE = 4
_NUM_CLASSES = len(CLASS_NAMES)


class Segmenter(nn.Module):
    """The base class of the networks; each defines ``logits``.

    A batch is a dict with ``image``, float32 ``[N, 1, 48, 48]``, and, for the losses, ``label`` ``[N, 48, 48]`` int64.
    Train mode returns ``losses(batch)``, eval mode logits ``[N, 11, 48, 48]``.
    """

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        return {"width": cfg.MODEL.WIDTH}

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor] | Tensor:
        return self.losses(batch) if self.training else self.logits(batch["image"])

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss_seg": F.cross_entropy(self.logits(batch["image"]), batch["label"])}

    def logits(self, image: Tensor) -> Tensor:
        raise NotImplementedError


def _conv(channels_in: int, channels_out: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(channels_in, channels_out, kernel_size=3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    ]


def _convs(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(*_conv(channels_in, channels_out), *_conv(channels_out, channels_out))


def _upsample(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="bilinear")


class Pyramid(nn.Module):
    """Features of an image in four sizes; each size is half of the previous size.

    Args:
        width: channels at full size; they double with each halving except the last.

    Returns:
        ``[N, width, 48, 48]`` to ``[N, 4 * width, 6, 6]``.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        if not isinstance(width, int) or width < 1:
            raise ConfigError(f"MODEL.WIDTH is {width!r}; accepted: a number of at least 1")
        self.widths = [width, 2 * width, 4 * width, 4 * width]
        self.stages = nn.ModuleList(map(_convs, [1, *self.widths[:-1]], self.widths))

    def forward(self, image: Tensor) -> list[Tensor]:
        features = [self.stages[0](image)]
        for stage in self.stages[1:]:
            features.append(stage(F.max_pool2d(features[-1], 2)))
        return features


@MODEL_REGISTRY.register()
class UNet(Segmenter):
    """Joins the features of a `Pyramid`, starting with the smallest (arXiv:1505.04597)."""

    @configurable
    def __init__(self, width: int) -> None:
        super().__init__()
        self.pyramid = Pyramid(width)
        widths = itertools.pairwise(self.pyramid.widths)
        self.up = nn.ModuleList(_convs(large + small, large) for large, small in widths)
        self.classifier = nn.Conv2d(width, _NUM_CLASSES, kernel_size=1)

    def logits(self, image: Tensor) -> Tensor:
        *features, x = self.pyramid(image)
        for convs in reversed(self.up):
            x = convs(torch.cat([features.pop(), _upsample(x)], dim=1))
        return self.classifier(x)


@MODEL_REGISTRY.register()
class FCN(Segmenter):
    """Adds up scores from each feature map of a `Pyramid`, starting with the smallest (arXiv:1411.4038)."""

    @configurable
    def __init__(self, width: int) -> None:
        super().__init__()
        self.pyramid = Pyramid(width)
        self.classifiers = nn.ModuleList(
            nn.Conv2d(channels, _NUM_CLASSES, 1) for channels in self.pyramid.widths
        )

    def logits(self, image: Tensor) -> Tensor:
        features = self.pyramid(image)
        *scores, total = [
            classifier(x) for classifier, x in zip(self.classifiers, features, strict=True)
        ]
        while scores:
            total = _upsample(total) + scores.pop()
        return total


class ViT(nn.Module):
    """Transformer layers on patches of 4 x 4 pixels (arXiv:2010.11929), without a class token.

    Two parts are hard to learn from a few thousand canvases. So three convolutions compute the patches
    (arXiv:2106.14881), and positions start as sines and cosines (arXiv:2205.01580).

    Args:
        dim: numbers per token, a multiple of 4 and of ``num_heads``.
        depth: number of layers.

    Returns:
        ``[N, dim, 12, 12]``.
    """

    def __init__(self, dim: int, depth: int, num_heads: int) -> None:
        super().__init__()
        self.patch_embed = nn.Sequential(
            *_conv(1, dim // 2, stride=2),
            *_conv(dim // 2, dim, stride=2),
            nn.Conv2d(dim, dim, 3, padding=1),
        )
        self.pos_embed = nn.Parameter(_sines_and_cosines(dim, CANVAS_SIZE // PATCH_SIZE))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim,
                num_heads,
                4 * dim,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image)
        tokens = x.flatten(2).transpose(1, 2) + self.pos_embed
        for layer in self.layers:
            tokens = layer(tokens)
        return self.norm(tokens).transpose(1, 2).reshape(x.shape)


def _sines_and_cosines(dim: int, size: int) -> Tensor:
    """Positions ``[1, size * size, dim]``: sines and cosines of rows and columns in ``dim / 4`` frequencies."""
    angles = torch.arange(size)[:, None] / 100 ** (torch.arange(dim // 4) / (dim // 4))
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows = waves[:, None].expand(size, size, dim // 2)
    return torch.cat([rows, rows.transpose(0, 1)], dim=2).reshape(1, size * size, dim)


@MODEL_REGISTRY.register()
class ViTSegmenter(Segmenter):
    """A `ViT` in which each token scores the pixels of its patch."""

    @configurable
    def __init__(self, dim: int, depth: int, num_heads: int) -> None:
        super().__init__()
        self.backbone = ViT(dim, depth, num_heads)
        self.head = nn.Sequential(
            nn.Conv2d(dim, _NUM_CLASSES * PATCH_SIZE**2, 1), nn.PixelShuffle(PATCH_SIZE)
        )

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        return {
            "dim": cfg.MODEL.VIT.DIM,
            "depth": cfg.MODEL.VIT.DEPTH,
            "num_heads": cfg.MODEL.VIT.NUM_HEADS,
        }

    def logits(self, image: Tensor) -> Tensor:
        return self.head(self.backbone(image))
