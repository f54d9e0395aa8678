"""Online deep clustering (arXiv:2006.10645)."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from projects.selfsup.backbone import SelfSupModel, mlp, pool
from projects.selfsup.clustering import kmeans, means
from projects.selfsup.features import extract_features, loss_weights, put_sizes, train_dataset_name
from trainkit.config import CfgNode, ConfigError, configurable
from trainkit.data import DatasetCatalog
from trainkit.engine import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY, check_period, is_due
from trainkit.modeling import MODEL_REGISTRY
from trainkit.utils import comm
from trainkit.utils.model import unwrap_model
from trainkit.utils.sharding import is_sharded_model

logger = logging.getLogger(__name__)


class Memory(nn.Module):
    """What is remembered of all samples and clusters (sections 3.1 and 3.2); an `ODCHook` fills it.

    Attributes:
        features: ``[N, D]``, rows of length 1.
        labels: the cluster of each sample, int64 ``[N]``.
        centroids: ``[K, D]``, the means of the members when they were last updated.

    Args:
        momentum: how much a new feature counts, beside ``1 - momentum`` of the old one.
    """

    def __init__(self, num_samples: int, dim: int, num_clusters: int, momentum: float) -> None:
        super().__init__()
        self._momentum = momentum
        self.features: Tensor
        self.labels: Tensor
        self.centroids: Tensor
        self.register_buffer("features", torch.zeros(num_samples, dim))
        self.register_buffer("labels", torch.zeros(num_samples, dtype=torch.int64))
        self.register_buffer("centroids", torch.zeros(num_clusters, dim))

    def sizes(self) -> Tensor:
        """Samples per cluster, ``[K]``."""
        return torch.bincount(self.labels, minlength=len(self.centroids))

    def begin(self, features: Tensor, labels: Tensor) -> None:
        """Take the features ``[N, D]`` and labels ``[N]`` of all samples."""
        self.features.copy_(F.normalize(features))
        self.labels.copy_(labels)
        self.update_centroids()

    def update(self, index: Tensor, features: Tensor) -> None:
        """Mix the features ``[n, D]`` of the samples ``index`` ``[n]`` in; their clusters are those nearest then."""
        mixed = F.normalize(self.features[index].lerp(F.normalize(features), self._momentum))
        self.features[index] = mixed
        self.labels[index] = torch.cdist(mixed, self.centroids).argmin(1)

    def update_centroids(self) -> None:
        """An empty cluster keeps the one it had."""
        found = means(self.features, self.labels, len(self.centroids))
        self.centroids.copy_(torch.where(self.sizes()[:, None] > 0, found, self.centroids))

    def dissolve_small(self, min_size: int, generator: torch.Generator) -> int:
        """Give the members of clusters with less than ``min_size`` to the nearest others, and halve large ones.

        Each small cluster becomes one half, by k-means, of what is the largest cluster at its turn. Behind it all
        centroids are means.

        Returns:
            How many clusters were small.
        """
        sizes = self.sizes()
        small, others = (sizes < min_size).nonzero().flatten(), (sizes >= min_size).nonzero().flatten()
        members = torch.isin(self.labels, small)
        self.labels[members] = others[torch.cdist(self.features[members], self.centroids[others]).argmin(1)]
        for cluster in small.tolist():
            members = (self.labels == self.sizes().argmax()).nonzero().flatten()
            halves, _ = kmeans(self.features[members], 2, generator)
            self.labels[members[halves == 1]] = cluster
        self.update_centroids()
        return len(small)


@MODEL_REGISTRY.register()
class ODC(SelfSupModel):
    """A view is to be told to belong to the cluster that the memory has for its sample.

    A cluster counts in the loss as ``1 / sqrt(size)`` (section 3.3).

    Args:
        num_samples: of the training data.
        hidden_dim, dim: of the layers between the backbone and the head; the memory holds what the second one gives.
        momentum: see `Memory`.

    Attributes:
        embeddings: ``[N, dim]`` of the last batch in train mode, float32, without a gradient.
    """

    @configurable
    def __init__(
        self, width: int, num_samples: int, hidden_dim: int, dim: int, num_clusters: int, momentum: float
    ) -> None:
        super().__init__(width)
        # centred, so that features differ in direction
        self.neck = nn.Sequential(mlp(self.backbone.out_channels, hidden_dim, dim), nn.BatchNorm1d(dim, affine=False))
        self.head = nn.Linear(dim, num_clusters)
        self.memory = Memory(num_samples, dim, num_clusters, momentum)
        self.embeddings = torch.empty(0, dim)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        odc = cfg.MODEL.ODC
        return {
            **super().from_config(cfg),
            "num_samples": len(DatasetCatalog.get(train_dataset_name(cfg))),
            "hidden_dim": odc.HIDDEN_DIM,
            "dim": odc.DIM,
            "num_clusters": odc.NUM_CLUSTERS,
            "momentum": odc.MOMENTUM,
        }

    def embed(self, image: Tensor) -> Tensor:
        return self.neck(pool(self.backbone(image)))

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        embeddings = self.embed(batch["view1"])
        self.embeddings = embeddings.detach().float()
        weights = loss_weights(self.memory.sizes(), power=0.5)
        labels = self.memory.labels[batch["index"]]
        return {"loss_cluster": F.cross_entropy(self.head(embeddings), labels, weight=weights)}


@HOOK_REGISTRY.register()
class ODCHook(HookBase):
    """Keep the memory of an `ODC`: k-means of the whole set before the first iteration, then step by step.

    The step's samples are remembered in ``after_backward``, those of all ranks on all ranks. The head stays as it is
    when clusters change.

    Args:
        model: may be wrapped.
        centroids_period: iterations from one update of all centroids to the next.
        dissolve_period: iterations from one look for small clusters to the next.
        min_size: clusters with less samples are dissolved.
    """

    def __init__(
        self, cfg: CfgNode, model: nn.Module, centroids_period: int, dissolve_period: int, min_size: int
    ) -> None:
        inner = unwrap_model(model)
        if not isinstance(inner, ODC):
            raise ConfigError(f"ODCHook needs an ODC, got {type(inner).__name__}; change MODEL.NAME")
        if is_sharded_model(inner):
            raise ConfigError('MODEL.PARALLEL is "fsdp", but ODCHook does not work with a divided model; make it "ddp"')
        if cfg.SOLVER.ACCUMULATION_STEPS != 1:
            raise ConfigError(
                f"SOLVER.ACCUMULATION_STEPS is {cfg.SOLVER.ACCUMULATION_STEPS}, but ODCHook remembers the last "
                "micro-batch of an iteration only; make it 1"
            )
        num_samples, num_clusters = len(inner.memory.labels), len(inner.memory.centroids)
        if min_size * num_clusters > num_samples:  # all clusters could be small
            raise ConfigError(
                f"min_size must be at most {num_samples // num_clusters}, so that {num_samples} samples are enough for "
                f"{num_clusters} clusters, got {min_size}"
            )
        self._cfg, self._model = cfg, inner
        self._centroids_period = check_period("centroids_period", centroids_period, minimum=1)
        self._dissolve_period = check_period("dissolve_period", dissolve_period, minimum=1)
        self._min_size = check_period("min_size", min_size, minimum=1)
        self._num_dissolved = 0
        self._is_loaded = False

    def before_train(self) -> None:
        if self.trainer.start_iter == 0 and not self._is_loaded:
            self._num_dissolved = 0
            self._begin()
        self._is_loaded = False

    def after_backward(self) -> None:
        model = self._model
        model.memory.update(_of_all_ranks(self.trainer.batch["index"]), _of_all_ranks(model.embeddings))

    def after_step(self) -> None:
        memory = self._model.memory
        if is_due(self.trainer, self._centroids_period):
            memory.update_centroids()
        if is_due(self.trainer, self._dissolve_period):
            self._dissolve_small(memory)

    def _begin(self) -> None:
        model = self._model
        features = F.normalize(extract_features(self._cfg, model, lambda batch: model.embed(batch["image"])))
        labels: Any = None
        if comm.is_main_process():
            labels, _ = kmeans(features, len(model.memory.centroids), torch.default_generator)
        model.memory.begin(features, comm.broadcast(labels))
        put_sizes(self.trainer.storage, model.memory.sizes())

    def _dissolve_small(self, memory: Memory) -> None:
        """On rank 0, whose random state decides it."""
        put_sizes(self.trainer.storage, memory.sizes())
        num_small = memory.dissolve_small(self._min_size, torch.default_generator) if comm.is_main_process() else 0
        num_small, labels = comm.broadcast((num_small, memory.labels.cpu()))
        memory.labels.copy_(labels)
        memory.update_centroids()
        self._num_dissolved += num_small
        self.trainer.storage.put_scalar("clusters/dissolved", self._num_dissolved, smoothing_hint=False)

    def state_dict(self) -> dict[str, Any]:
        """``num_dissolved``, the small clusters so far; the memory belongs to the model's state."""
        return {"num_dissolved": self._num_dissolved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_dissolved, self._is_loaded = state_dict["num_dissolved"], True


def _of_all_ranks(tensor: Tensor) -> Tensor:
    """``[n, ...]`` of each rank as ``[world size * n, ...]``."""
    if comm.get_world_size() == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(comm.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)
