"""What the settings of a digits job name that trainkit does not have: a hook, a drawing, and models of a user's own."""

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from projects.digits import DigitsCNN, load_split
from trainkit.config import CfgNode
from trainkit.data import DatasetCatalog
from trainkit.engine import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY, VISUALIZER_REGISTRY
from trainkit.modeling import MODEL_REGISTRY
from trainkit.solver import OPTIMIZER_REGISTRY


@HOOK_REGISTRY.register()
class Probe(HookBase):
    """Store the ``square`` of the iteration, and what nothing but a process itself can tell."""

    def __init__(self, factor: float = 1.0) -> None:
        self._factor = factor

    def after_step(self) -> None:
        self.trainer.storage.put_scalars(
            square=self._factor * self.trainer.iter**2,
            collects_by_itself=gc.isenabled(),
            collections=gc.get_stats()[1]["collections"],
        )


@VISUALIZER_REGISTRY.register()
def first_scan(inputs: dict[str, Tensor], outputs: Tensor) -> Tensor:
    """The first image of the batch, and below it its logits, from black for the lowest to white for the highest."""
    scan, logits = inputs["image"][0, 0], outputs[0, :8]
    logits = (logits - logits.min()) / (logits.max() - logits.min())
    return (255 * torch.cat([scan, logits[None]])).to(torch.uint8)[..., None].expand(-1, -1, 3)


@MODEL_REGISTRY.register()
class DigitsWithSpare(DigitsCNN):
    """With a layer that the forward pass leaves out, and a number of operations."""

    flops_per_sample = 3e6

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__(cfg)
        self.spare = nn.Linear(2, 2)


@MODEL_REGISTRY.register()
class DigitsThatReport(nn.Module):
    """A layer of each kind that parameter groups tell apart; logs whether there are gradients, and the float type."""

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, kernel_size=3, padding=1)
        self.norm = nn.GroupNorm(1, 2)
        self.head = nn.Linear(2 * 8 * 8, 10)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor] | Tensor:
        logits: Tensor = self.head(self.norm(self.conv(batch["image"])).flatten(1))
        if not self.training:
            return logits
        return {
            "loss_cls": F.cross_entropy(logits, batch["label"]),
            "has_gradients": torch.tensor(float(any(param.grad is not None for param in self.parameters()))),
            "eps": torch.tensor(torch.finfo(logits.dtype).eps),
        }


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
