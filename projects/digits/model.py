"""A small convolutional network."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from trainkit.config import CfgNode, ConfigError, configurable
from trainkit.modeling import MODEL_REGISTRY


def _conv(channels_in: int, channels_out: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    ]


@MODEL_REGISTRY.register()
class DigitsCNN(nn.Module):
    """Four convolutions with batch norm and one linear layer.

    A batch is a dict with ``image``, float32 ``[N, 1, 8, 8]`` in [0, 1], and, for the losses, ``label`` ``[N]`` int64.
    Train mode returns ``losses(batch)``, eval mode logits ``[N, 10]``.

    Args:
        width: channels of the first two convolutions; the other two have twice as many.
    """

    @configurable
    def __init__(self, width: int, dropout: float = 0.2, label_smoothing: float = 0.1) -> None:
        super().__init__()
        if not isinstance(width, int) or width < 1:
            raise ConfigError(f"MODEL.WIDTH is {width!r}; accepted: a number of at least 1")
        self.layers = nn.Sequential(
            *_conv(1, width),
            *_conv(width, width),
            nn.MaxPool2d(2),
            *_conv(width, 2 * width),
            *_conv(2 * width, 2 * width),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * width * 4 * 4, 10),
        )
        self.label_smoothing = label_smoothing

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        return {"width": cfg.MODEL.WIDTH}

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor] | Tensor:
        if self.training:
            return self.losses(batch)
        return self.layers(batch["image"])

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = self.layers(batch["image"])
        smoothing = self.label_smoothing
        loss = F.cross_entropy(logits, batch["label"], label_smoothing=smoothing)
        return {"loss_cls": loss}
