"""The memory and the hook of online deep clustering (arXiv:2006.10645)."""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from trainkit.engine.hooks import HOOK_REGISTRY, check_period, is_due
from trainkit.utils import comm
from trainkit_selfsup.clustering import (
    check_finite_rows,
    kmeans,
    means,
    most_similar_centroids,
    nearest_centroids,
)
from trainkit_selfsup.protocol import ClusterHook


class ODCMemory(nn.Module):
    """A feature and a label of each sample, and the centroids of the clusters; equal on all ranks (section 3).

    ``feature_bank`` ``[length, feat_dim]`` has rows of length 1; ``label_bank``, int64 ``[length]``, the cluster of
    each sample; ``centroids`` ``[num_classes, feat_dim]``, the means of the members at their last update.

    Args:
        length: the number of samples.
        momentum: the weight of a new feature; the old feature has the weight ``1 - momentum``.
        num_classes: the number of clusters.
        min_cluster: clusters with fewer samples are small.
        assign_by: a sample belongs to the centroid with the largest inner product, as in the authors' code, or to the
            nearest one by distance. They differ because a centroid is a mean, which is shorter than 1 if its members
            have different directions.
    """

    feature_bank: Tensor
    label_bank: Tensor
    centroids: Tensor

    def __init__(
        self,
        length: int,
        feat_dim: int,
        momentum: float,
        num_classes: int,
        min_cluster: int,
        assign_by: Literal["inner_product", "distance"] = "inner_product",
    ) -> None:
        super().__init__()
        ways = ("inner_product", "distance")
        largest = length // num_classes  # all clusters must not be small
        is_accepted = 0 <= momentum <= 1 and 1 <= min_cluster <= largest and assign_by in ways
        if not is_accepted:
            raise ValueError(
                f"momentum must be from 0 to 1, min_cluster from 1 to {largest}, "
                f"assign_by one of {ways}; got {momentum!r}, {min_cluster!r} and {assign_by!r}"
            )
        self.momentum = momentum
        self.num_classes = num_classes
        self.min_cluster = min_cluster
        self.assign_by = assign_by
        self.register_buffer("feature_bank", torch.zeros(length, feat_dim))
        self.register_buffer("label_bank", torch.zeros(length, dtype=torch.int64))
        self.register_buffer("centroids", torch.zeros(num_classes, feat_dim))

    def sizes(self) -> Tensor:
        """Samples per cluster, ``[num_classes]``."""
        return torch.bincount(self.label_bank, minlength=self.num_classes)

    def init_memory(self, feature: Tensor, label: Tensor) -> None:
        """Take the features ``[length, feat_dim]`` and labels ``[length]`` of all samples.

        Raises:
            ValueError: a feature is NaN or inf.
        """
        check_finite_rows("feature", feature)
        self.feature_bank.copy_(F.normalize(feature))
        self.label_bank.copy_(label)
        self.update_centroids_memory()

    @torch.no_grad()
    def update_samples_memory(self, idx: Tensor, feature: Tensor) -> Tensor:
        """Average new features ``[n, feat_dim]`` of the samples ``idx`` ``[n]`` into the memory; update their clusters.

        Every rank calls it with its own samples; the model calls it after its loss has read the labels. Returns the
        change ratio, shape ``[]``: the fraction of these samples, over all ranks, whose label has changed.
        """
        idx = _of_all_ranks(idx)
        feature = _of_all_ranks(F.normalize(feature.float()))
        former = self.feature_bank[idx]
        mixed = F.normalize(former.lerp(feature, self.momentum))
        self.feature_bank[idx] = mixed
        labels = self._assign(mixed, self.centroids)
        has_changed = labels != self.label_bank[idx]
        self.label_bank[idx] = labels
        return has_changed.float().mean()

    def update_centroids_memory(self) -> None:
        """Set every centroid to the mean of its members; an empty cluster keeps its centroid."""
        found = means(self.feature_bank, self.label_bank, self.num_classes)
        has_members = self.sizes()[:, None] > 0
        self.centroids.copy_(torch.where(has_members, found, self.centroids))

    def deal_with_small_clusters(self) -> None:
        """Give the samples of small clusters to other clusters; then each small one takes half of the largest cluster.

        Rank 0 finds the two halves by k-means. The centroids of both clusters become the means of the halves. The other
        centroids do not change, as in the authors' code.
        """
        if comm.is_main_process():
            self._dissolve_small()
        labels, centroids = comm.broadcast((self.label_bank.cpu(), self.centroids.cpu()))
        self.label_bank.copy_(labels)
        self.centroids.copy_(centroids)

    def _dissolve_small(self) -> None:
        is_small = self.sizes() < self.min_cluster
        small = is_small.nonzero().flatten()
        others = (~is_small).nonzero().flatten()
        members = is_small[self.label_bank]
        nearest = self._assign(self.feature_bank[members], self.centroids[others])
        self.label_bank[members] = others[nearest]
        for cluster in small.tolist():
            largest = int(self.sizes().argmax())
            members = (self.label_bank == largest).nonzero().flatten()
            generator = torch.Generator().manual_seed(0)
            halves, centroids = kmeans(self.feature_bank[members], 2, generator, max_iters=20)
            self.label_bank[members[halves == 1]] = cluster
            self.centroids[largest] = centroids[0]
            self.centroids[cluster] = centroids[1]

    def _assign(self, features: Tensor, centroids: Tensor) -> Tensor:
        if self.assign_by == "distance":
            _, nearest = nearest_centroids(features, centroids)
            return nearest
        return most_similar_centroids(features, centroids)


def _of_all_ranks(tensor: Tensor) -> Tensor:
    """``[n, ...]`` of each rank, concatenated to ``[world size * n, ...]``."""
    if comm.get_world_size() == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(comm.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


@HOOK_REGISTRY.register()
class ODCHook(ClusterHook):
    """Update the centroids, deal with small clusters, and store the sizes of clusters, each at its interval.

    The model has ``memory_bank`` with ``label_bank``, int64 ``[N]`` in which the model writes the labels of a batch,
    ``num_classes``, ``update_centroids_memory()`` and ``deal_with_small_clusters()``; an `ODCMemory` has them. A
    `DeepClusterHook` with ``init_memory`` fills the memory at the start of a run, and tells what ``reweight`` means:
    here it happens after each iteration. (MMSelfSup's hook does so even if this is False, with the power 0.5.) The hook
    depends only on the iteration and the memory, so it has no state.
    """

    def __init__(
        self,
        centroids_update_interval: int,
        deal_with_small_clusters_interval: int,
        evaluate_interval: int,
        reweight: bool = True,
        reweight_pow: float = 0.5,
    ) -> None:
        super().__init__(reweight, reweight_pow)
        of_centroids = centroids_update_interval
        of_small_clusters = deal_with_small_clusters_interval
        self._centroids_period = check_period("centroids_update_interval", of_centroids, minimum=1)
        self._small_clusters_period = check_period(
            "deal_with_small_clusters_interval", of_small_clusters, minimum=1
        )
        self._evaluate_period = check_period("evaluate_interval", evaluate_interval, minimum=1)

    def before_train(self) -> None:
        names = ("label_bank", "num_classes", "update_centroids_memory", "deal_with_small_clusters")
        self.find_model(*(f"memory_bank.{name}" for name in names))

    def after_step(self) -> None:
        memory = self._model.memory_bank
        if is_due(self.trainer, self._centroids_period):
            memory.update_centroids_memory()
        if is_due(self.trainer, self._small_clusters_period):
            memory.deal_with_small_clusters()
        sizes = torch.bincount(memory.label_bank, minlength=memory.num_classes)
        self.weight_classes(sizes)
        if is_due(self.trainer, self._evaluate_period):
            self.put_sizes(sizes)
