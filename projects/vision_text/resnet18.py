"""torchvision's resnet18: by the config resnet18.yaml, and by a subclass."""

import re
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.models import resnet18

from projects.vision_text.data import CLASS_NAMES, Shapes, ToImage
from projects.vision_text.job import IMAGES, start
from trainkit.config import CfgNode
from trainkit.data import MapDataset
from trainkit.engine import DefaultTrainer
from trainkit.modeling import MODEL_REGISTRY, losses_from
from trainkit.solver import LAYER_DEPTH_REGISTRY


@MODEL_REGISTRY.register()
def Resnet18(cfg: CfgNode) -> nn.Module:
    """The resnet18 of torchvision. A batch is a dict with ``image`` and ``label``, or a tuple of these two."""
    return losses_from(resnet18(num_classes=len(CLASS_NAMES)), F.cross_entropy)


@LAYER_DEPTH_REGISTRY.register()
def resnet_depth(name: str) -> tuple[int, int]:
    """The first convolution and its norm are layer 0, ``layer1`` to ``layer4`` are 1 to 4, ``fc`` is 5, of 6 layers."""
    num_layers = 6
    stage = re.match(r"layer(\d)\.", name)
    if stage:
        return int(stage[1]), num_layers
    if name.startswith("fc."):
        return 5, num_layers
    return 0, num_layers


class Trainer(DefaultTrainer):
    """A batch is a list [images, labels], which a plain ``DataLoader`` makes of samples that are tuples."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        return losses_from(resnet18(num_classes=len(CLASS_NAMES)), F.cross_entropy)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode, seed: int = 0) -> Any:
        pairs = MapDataset(Shapes(480, seed), as_pair)
        return DataLoader(pairs, cfg.SOLVER.IMS_PER_BATCH, shuffle=not seed)

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Any:
        return cls.build_train_loader(cfg, seed=1)


def as_pair(sample: dict[str, Any]) -> tuple[Any, int]:
    image = ToImage()(sample)["image"]
    return image, sample["label"]


if __name__ == "__main__":
    start(Trainer, [*IMAGES, "SOLVER.MAX_ITER", 30, "SOLVER.WARMUP_ITERS", 3])
