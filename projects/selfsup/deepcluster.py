"""DeepCluster (arXiv:1807.05520)."""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from projects.selfsup.backbone import SelfSupModel, pool
from projects.selfsup.clustering import kmeans
from projects.selfsup.features import extract_features, loss_weights, put_sizes, train_dataset_name, whiten
from trainkit.config import CfgNode, ConfigError, configurable
from trainkit.data import DatasetCatalog, build_train_loader
from trainkit.engine import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY, check_period, is_due
from trainkit.modeling import MODEL_REGISTRY
from trainkit.utils import comm
from trainkit.utils.model import unwrap_model
from trainkit.utils.sharding import is_sharded_model

logger = logging.getLogger(__name__)

_HEAD_STD = 0.01  # of the weights of a new head


@MODEL_REGISTRY.register()
class DeepCluster(SelfSupModel):
    """Both views are to be told to belong to their sample's cluster, which a `DeepClusterHook` gives as its ``label``.

    Each cluster counts as much as if the samples were drawn evenly from all clusters (section 3.4).

    Args:
        num_clusters: best several times as many as there are classes.
    """

    @configurable
    def __init__(self, width: int, num_clusters: int) -> None:
        super().__init__(width)
        self.head = nn.Linear(self.backbone.out_channels, num_clusters)
        self.label_weights: Tensor
        self.register_buffer("label_weights", torch.ones(num_clusters))

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        return {**super().from_config(cfg), "num_clusters": cfg.MODEL.DEEPCLUSTER.NUM_CLUSTERS}

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = self.head(pool(self.backbone(torch.cat([batch["view1"], batch["view2"]]))))
        return {"loss_cluster": F.cross_entropy(logits, batch["label"].repeat(2), weight=self.label_weights)}

    @torch.no_grad()
    def begin(self, sizes: Tensor, head_weight: Tensor) -> None:
        """Take the head ``[K, C]`` for new clusters of these sizes ``[K]``."""
        self.head.weight.copy_(head_weight)
        self.head.bias.zero_()
        self.label_weights.copy_(loss_weights(sizes, power=1.0))


@HOOK_REGISTRY.register()
class DeepClusterHook(HookBase):
    """Cluster the features of the training data before the first iteration and after every ``period``-th one.

    The data are then loaded with the new labels, from the place that was reached; batches that were loaded ahead with
    the old ones are dropped. The model, a `DeepCluster`, gets a new head, and the optimizer forgets the old one. It
    belongs before the checkpointer, where a hook of the config stands. Rank 0 finds the clusters for all ranks.

    Args:
        model: may be wrapped.
        dim: principal components that are clustered, whitened and with length 1 (section 4.1).
    """

    def __init__(self, cfg: CfgNode, model: nn.Module, period: int, dim: int) -> None:
        inner = unwrap_model(model)
        if not isinstance(inner, DeepCluster):
            raise ConfigError(f"DeepClusterHook needs a DeepCluster, got {type(inner).__name__}; change MODEL.NAME")
        if is_sharded_model(inner):
            raise ConfigError(
                'MODEL.PARALLEL is "fsdp", but DeepClusterHook does not work with a divided model; make it "ddp"'
            )
        num_features = inner.head.in_features
        if not 1 <= dim <= num_features:
            raise ConfigError(f"dim must be from 1 to the {num_features} features of the model, got {dim}")
        self._cfg, self._model = cfg, inner
        self._samples: list[dict[str, Any]] = DatasetCatalog.get(train_dataset_name(cfg))
        self._period = check_period("period", period, minimum=1)
        self._dim = dim
        self._labels: Tensor | None = None
        self._num_clusterings = 0
        self._is_loaded = False

    def before_train(self) -> None:
        if self._labels is None or (self.trainer.start_iter == 0 and not self._is_loaded):
            self._num_clusterings = 0
            self._cluster()
        else:
            self._load_data(self._labels)
        self._is_loaded = False

    def after_step(self) -> None:
        if is_due(self.trainer, self._period):
            self._cluster()

    def _cluster(self) -> None:
        model = self._model
        num_clusters, width = model.head.weight.shape
        features = extract_features(self._cfg, model, model)
        found: Any = None
        if comm.is_main_process():
            labels, _ = kmeans(whiten(features, self._dim), num_clusters, torch.default_generator)
            found = labels, _HEAD_STD * torch.randn(num_clusters, width)
        labels, head_weight = comm.broadcast(found)
        sizes = torch.bincount(labels, minlength=num_clusters)
        model.begin(sizes, head_weight)
        for parameter in model.head.parameters():
            # zeros are what the optimizers begin with
            for value in self.trainer.optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor):
                    value.zero_()
        self._labels = labels
        self._num_clusterings += 1
        self._load_data(labels)
        put_sizes(self.trainer.storage, sizes)
        logger.info("Clustering %d: %d to %d samples", self._num_clusterings, sizes.min(), sizes.max())

    def _load_data(self, labels: Tensor) -> None:
        place = self.trainer.data_loader.state_dict()
        samples = [sample | {"label": label} for sample, label in zip(self._samples, labels.tolist(), strict=True)]
        self.trainer.reset_data_loader(lambda: build_train_loader(self._cfg, samples))
        self.trainer.data_loader.load_state_dict(place)

    def state_dict(self) -> dict[str, Any]:
        """``labels`` ``[N]`` of all samples, and ``num_clusterings``."""
        return {"labels": self._labels, "num_clusterings": self._num_clusterings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._labels, self._num_clusterings = state_dict["labels"], state_dict["num_clusterings"]
        self._is_loaded = True
