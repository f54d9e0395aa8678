"""What the settings of hooks name that trainkit does not have: a hook, a drawing, data and models of a user's own."""

import gc
from typing import Any

import torch
from torch import Tensor, nn

from projects.digits import DigitsCNN, DigitsTransform, load_split
from trainkit.config import CfgNode
from trainkit.data import DatasetCatalog
from trainkit.engine import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY, VISUALIZER_REGISTRY
from trainkit.modeling import MODEL_REGISTRY
from trainkit.utils.events import get_event_storage


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


class _DigitsByEpoch:
    """The training data; says in the storage which epoch it was told."""

    def __init__(self) -> None:
        self._samples = [DigitsTransform()(sample) for sample in load_split("train")]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._samples[index]

    def set_epoch(self, epoch: int) -> None:
        get_event_storage().put_scalar("epoch_of_data", epoch)


DatasetCatalog.register("digits_by_epoch", _DigitsByEpoch)


@MODEL_REGISTRY.register()
class DigitsWithFlops(DigitsCNN):
    flops_per_sample = 3e6


@MODEL_REGISTRY.register()
class DigitsWithSpare(DigitsCNN):
    """With a layer that the forward pass leaves out."""

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__(cfg)
        self.spare = nn.Linear(2, 2)
