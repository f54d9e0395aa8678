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
        if self.training:
            return self.losses(batch)
        return self.logits(batch["image"])

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = self.logits(batch["image"])
        return {"loss_seg": F.cross_entropy(logits, batch["label"])}

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
        self.stages = nn.ModuleList()
        channels = 1
        for width_of_stage in self.widths:
            self.stages.append(_convs(channels, width_of_stage))
            channels = width_of_stage

    def forward(self, image: Tensor) -> list[Tensor]:
        features = [self.stages[0](image)]
        for stage in self.stages[1:]:
            smaller = F.max_pool2d(features[-1], 2)
            features.append(stage(smaller))
        return features


@MODEL_REGISTRY.register()
class UNet(Segmenter):
    """Joins the features of a `Pyramid`, starting with the smallest (arXiv:1505.04597)."""

    @configurable
    def __init__(self, width: int) -> None:
        super().__init__()
        self.pyramid = Pyramid(width)
        self.up = nn.ModuleList()
        # the number of channels of a feature map, and of the next smaller one
        for large, small in itertools.pairwise(self.pyramid.widths):
            self.up.append(_convs(large + small, large))
        self.classifier = nn.Conv2d(width, _NUM_CLASSES, kernel_size=1)

    def logits(self, image: Tensor) -> Tensor:
        features = self.pyramid(image)
        x = features.pop()
        for convs in reversed(self.up):
            joined = torch.cat([features.pop(), _upsample(x)], dim=1)
            x = convs(joined)
        return self.classifier(x)


@MODEL_REGISTRY.register()
class FCN(Segmenter):
    """Adds up scores from each feature map of a `Pyramid`, starting with the smallest (arXiv:1411.4038)."""

    @configurable
    def __init__(self, width: int) -> None:
        super().__init__()
        self.pyramid = Pyramid(width)
        self.classifiers = nn.ModuleList()
        for channels in self.pyramid.widths:
            self.classifiers.append(nn.Conv2d(channels, _NUM_CLASSES, 1))

    def logits(self, image: Tensor) -> Tensor:
        features = self.pyramid(image)
        scores = []
        for classifier, x in zip(self.classifiers, features, strict=True):
            scores.append(classifier(x))
        total = scores.pop()
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
        self.layers = nn.ModuleList()
        for _ in range(depth):
            layer = nn.TransformerEncoderLayer(
                dim,
                num_heads,
                4 * dim,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            self.layers.append(layer)
        self.norm = nn.LayerNorm(dim)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image)
        tokens = x.flatten(2).transpose(1, 2) + self.pos_embed
        for layer in self.layers:
            tokens = layer(tokens)
        return self.norm(tokens).transpose(1, 2).reshape(x.shape)


def _sines_and_cosines(dim: int, size: int) -> Tensor:
    """Positions ``[1, size * size, dim]``: sines and cosines of rows and columns in ``dim / 4`` frequencies."""
    exponents = torch.arange(dim // 4) / (dim // 4)
    angles = torch.arange(size)[:, None] / 100**exponents
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows = waves[:, None].expand(size, size, dim // 2)
    columns = rows.transpose(0, 1)
    positions = torch.cat([rows, columns], dim=2)
    return positions.reshape(1, size * size, dim)


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
        vit = cfg.MODEL.VIT
        return {"dim": vit.DIM, "depth": vit.DEPTH, "num_heads": vit.NUM_HEADS}

    def logits(self, image: Tensor) -> Tensor:
        return self.head(self.backbone(image))
