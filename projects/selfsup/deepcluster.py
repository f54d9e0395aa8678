"""DeepCluster (arXiv:1807.05520)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from projects.selfsup.backbone import Head, SelfSupModel
from trainkit.config import CfgNode, configurable
from trainkit.modeling import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class DeepCluster(SelfSupModel):
    """Classifies both views of a sample into the sample's cluster, its ``label``; see `DeepClusterHook`.

    With a power of 1 all clusters have the same weight, as if the samples were drawn evenly from them (section 3.4).

    Args:
        num_clusters: should be several times the number of classes.
    """

    loss_weight: Tensor

    @configurable
    def __init__(self, width: int, num_clusters: int) -> None:
        super().__init__(width)
        self.head = Head(self.backbone.out_channels, num_clusters)
        self.register_buffer("loss_weight", torch.full([num_clusters], 1 / num_clusters))

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        return {**super().from_config(cfg), "num_clusters": cfg.MODEL.DEEPCLUSTER.NUM_CLUSTERS}

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        views = torch.cat([batch["view1"], batch["view2"]])
        labels = batch["label"].repeat(2)
        logits = self.head(self.features(views))
        loss = F.cross_entropy(logits, labels, weight=self.loss_weight)
        return {"loss_cluster": loss}
