"""A vision transformer of timm: by the config vit.yaml, and by a subclass."""

from timm.models import VisionTransformer
from torch import nn
from torch.nn import functional as F

from projects.vision_text.data import CLASS_NAMES, SIZE
from projects.vision_text.job import IMAGES, start
from trainkit.config import CfgNode
from trainkit.engine import DefaultTrainer
from trainkit.modeling import MODEL_REGISTRY, losses_from


@MODEL_REGISTRY.register()
def TimmViT(cfg: CfgNode) -> nn.Module:
    """A vision transformer of timm with MODEL.DEPTH blocks."""
    options = {"patch_size": 8, "embed_dim": 64, "num_heads": 4, "depth": cfg.MODEL.DEPTH}
    return losses_from(
        VisionTransformer(SIZE, num_classes=len(CLASS_NAMES), **options), F.cross_entropy
    )


class Trainer(DefaultTrainer):
    """A batch is a dict of ``image`` and ``label``, from the registered data sets."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        model = VisionTransformer(
            SIZE, 8, num_classes=len(CLASS_NAMES), embed_dim=64, num_heads=4, depth=2
        )
        return losses_from(model, F.cross_entropy)


if __name__ == "__main__":
    start(Trainer, IMAGES)
