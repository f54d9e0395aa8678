"""Online deep clustering (arXiv:2006.10645)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from projects.selfsup.backbone import Head, SelfSupModel, mlp
from trainkit.config import CfgNode, configurable
from trainkit.data import DatasetCatalog
from trainkit.modeling import MODEL_REGISTRY
from trainkit_selfsup import ODCMemory


@MODEL_REGISTRY.register()
class ODC(SelfSupModel):
    """Classifies a view into the cluster that the memory has for its sample.

    `trainkit_selfsup.DeepClusterHook` fills the memory; `trainkit_selfsup.ODCHook` updates it and ``loss_weight``.

    Args:
        num_samples: the number of training samples.
        hidden_dim, dim: sizes of the two layers between backbone and head; the memory holds the output of the second
            layer.
        momentum, min_cluster: see `ODCMemory`.
    """

    loss_weight: Tensor

    @configurable
    def __init__(
        self,
        width: int,
        num_samples: int,
        hidden_dim: int,
        dim: int,
        num_clusters: int,
        momentum: float,
        min_cluster: int,
    ) -> None:
        super().__init__(width)
        # batch norm centres the features, so that they differ in direction
        self.neck = nn.Sequential(
            mlp(self.backbone.out_channels, hidden_dim, dim), nn.BatchNorm1d(dim, affine=False)
        )
        self.head = Head(dim, num_clusters)
        self.memory_bank = ODCMemory(num_samples, dim, momentum, num_clusters, min_cluster)
        self.register_buffer("loss_weight", torch.full([num_clusters], 1 / num_clusters))

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        odc = cfg.MODEL.ODC
        return {
            **super().from_config(cfg),
            "num_samples": len(DatasetCatalog.get(cfg.DATASETS.TRAIN[0])),
            "hidden_dim": odc.HIDDEN_DIM,
            "dim": odc.DIM,
            "num_clusters": odc.NUM_CLUSTERS,
            "momentum": odc.MOMENTUM,
            "min_cluster": odc.MIN_CLUSTER,
        }

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        embeddings = self.neck(self.features(batch["view1"]))
        labels = self.memory_bank.label_bank[batch["index"]]
        loss = F.cross_entropy(self.head(embeddings), labels, weight=self.loss_weight)
        change_ratio = self.memory_bank.update_samples_memory(batch["index"], embeddings.detach())
        return {"loss_cluster": loss, "change_ratio": change_ratio}
