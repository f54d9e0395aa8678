"""What the settings of a digits job name that trainkit does not have: models, functions of a user's own, a stream."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from projects.digits import load_split
from trainkit.config import CfgNode
from trainkit.data import DatasetCatalog
from trainkit.modeling import MODEL_REGISTRY
from trainkit.solver import OPTIMIZER_REGISTRY


class _DigitsModel(nn.Module):
    """Logits by ``logits(images)``. Besides the loss it reports on how it is trained, as entries that are only logged:

    - ``has_gradients``: whether there are gradients during the forward pass;
    - ``eps``: of the floating-point type of the logits;
    - ``compiled``: whether ``torch.compile`` is at work.
    """

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor] | Tensor:
        return self.losses(batch) if self.training else self.logits(batch["image"])

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = self.logits(batch["image"])
        return {
            "loss_cls": F.cross_entropy(logits, batch["label"]),
            "has_gradients": torch.tensor(float(any(param.grad is not None for param in self.parameters()))),
            "eps": torch.tensor(torch.finfo(logits.dtype).eps),
            "compiled": torch.tensor(float(torch.compiler.is_compiling())),
        }

    def logits(self, images: Tensor) -> Tensor:
        """Shape ``[N, 10]`` for images ``[N, 1, 8, 8]``."""
        raise NotImplementedError


@MODEL_REGISTRY.register()
class DigitsOfEveryKind(_DigitsModel):
    """One layer of each kind that parameter groups tell apart.

    ``MODEL.FROZEN`` lists the names of parameters that are not trained.
    """

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 2)  # one vector for each amount of ink
        self.dwconv = nn.Conv2d(2, 2, kernel_size=3, padding=1, groups=2)
        self.dwconv2 = nn.Conv2d(2, 2, kernel_size=3, padding=1, groups=2)
        self.norm = nn.GroupNorm(1, 2)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(2 * 8 * 8, 10)
        for name in cfg.MODEL.get("FROZEN", ()):
            self.get_parameter(name).requires_grad = False

    def logits(self, images: Tensor) -> Tensor:
        inks = self.embedding((16 * images[:, 0]).long()).permute(0, 3, 1, 2)
        return self.head(self.scale * self.norm(self.dwconv2(self.dwconv(inks))).flatten(1))


@OPTIMIZER_REGISTRY.register()
class SignSGD(torch.optim.SGD):
    """Steps of the same size for every value."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(group["lr"] * param.grad.sign())


class DigitsStream(IterableDataset[Any]):
    """The training data again and again, without a length."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(load_split("train"))


DatasetCatalog.register("digits_stream", DigitsStream)
