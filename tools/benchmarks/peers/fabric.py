"""https://lightning.ai/docs/fabric: the loop by hand, with Fabric's model, optimizer and backward."""

from collections.abc import Callable
from pathlib import Path

from lightning.fabric import Fabric
from torch import Tensor

from benchmarks import job
from benchmarks.by_hand import HandWrittenLoop


class FabricLoop(HandWrittenLoop):
    def __init__(self, folder: Path) -> None:
        super().__init__(job.make_model(), folder)
        self.fabric = Fabric(accelerator="cpu", devices=1)
        self.model, self.optimizer = self.fabric.setup(self.model, self.optimizer)

    def backward(self, total: Tensor) -> None:
        self.fabric.backward(total)


def make(folder: Path) -> Callable[[int], float]:
    return FabricLoop(folder)
