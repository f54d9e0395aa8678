"""The network that all methods train, and the common parts of their models."""

import itertools
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from trainkit.config import CfgNode, ConfigError, configurable


def _conv(channels_in: int, channels_out: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    ]


class Backbone(nn.Module):
    """Four convolutions with batch norm: ``[N, 1, 8, 8]`` to a map ``[N, out_channels, 4, 4]``.

    Args:
        width: channels of the first two convolutions; ``out_channels`` is four times as many.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        if not isinstance(width, int) or width < 1:
            raise ConfigError(f"MODEL.WIDTH is {width!r}; accepted: a number of at least 1")
        self.out_channels = 4 * width
        self.layers = nn.Sequential(
            *_conv(1, width),
            *_conv(width, width),
            nn.MaxPool2d(2),
            *_conv(width, 2 * width),
            *_conv(2 * width, self.out_channels),
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image)


def pool(features: Tensor) -> Tensor:
    """``[N, C]``: the mean of a map ``[N, C, H, W]``."""
    return F.adaptive_avg_pool2d(features, 1).flatten(1)


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with batch norm and ReLU between them, but not after the last one."""
    layers: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(widths[:-1]):
        layers.append(nn.Linear(width_in, width_out, bias=False))
        layers.append(nn.BatchNorm1d(width_out))
        layers.append(nn.ReLU(inplace=True))
    layers.append(nn.Linear(widths[-2], widths[-1]))
    return nn.Sequential(*layers)


class Head(nn.Linear):
    """A classifier of clusters; a hook initializes it again when the clusters change."""

    def init_weights(self) -> None:
        nn.init.normal_(self.weight, std=0.01)
        nn.init.zeros_(self.bias)


class SelfSupModel(nn.Module):
    """A backbone; each method adds the ``losses`` that train it.

    A batch is a dict, for the losses with ``view1`` and ``view2``, float32 ``[N, 1, 8, 8]``, and ``index``, int64
    ``[N]``. Train mode returns ``losses(batch)``, eval mode the pooled features ``[N, C]`` of ``batch["image"]``.

    The backbone is built first. So with the same seed it starts with the same weights in every method.
    """

    @configurable
    def __init__(self, width: int) -> None:
        super().__init__()
        self.backbone = Backbone(width)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        return {"width": cfg.MODEL.WIDTH}

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor] | Tensor:
        if self.training:
            return self.losses(batch)
        return self.extract_feat(batch)

    def extract_feat(self, batch: dict[str, Tensor]) -> Tensor:
        return self.features(batch["image"])

    def features(self, image: Tensor) -> Tensor:
        return pool(self.backbone(image))

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        raise NotImplementedError
