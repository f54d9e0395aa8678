"""The memory of online deep clustering (arXiv:2006.10645, sections 3.1 and 3.2)."""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from trainkit.utils import comm
from trainkit_selfsup.clustering import kmeans, means


class ODCMemory(nn.Module):
    """A feature and a label of each sample, and the centroids of the clusters; equal on all ranks.

    Attributes:
        feature_bank: ``[length, feat_dim]``, rows of length 1.
        label_bank: the cluster of each sample, int64 ``[length]``.
        centroids: ``[num_classes, feat_dim]``, the means of the members at the last update of the centroids.

    Args:
        length: the number of samples.
        momentum: the weight of a new feature; the old feature has the weight ``1 - momentum``.
        num_classes: the number of clusters.
        min_cluster: clusters with fewer samples are small.
        assign_by: a sample belongs to the centroid with the largest inner product, as in the authors' code, or to the
            nearest one by distance. They differ because a centroid is a mean, which is shorter than 1 if its members
            have different directions.

    Raises:
        ValueError: a number is out of range, or all clusters could be small.
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
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum must be from 0 to 1, got {momentum}")
        if min_cluster < 1 or min_cluster * num_classes > length:
            raise ValueError(
                f"min_cluster must be from 1 to {length // num_classes}, so that {length} samples are enough for "
                f"{num_classes} clusters, got {min_cluster}"
            )
        if assign_by not in ("inner_product", "distance"):
            raise ValueError(f'assign_by must be "inner_product" or "distance", got {assign_by!r}')
        self.momentum, self.num_classes, self.min_cluster = momentum, num_classes, min_cluster
        self.assign_by = assign_by
        self.register_buffer("feature_bank", torch.zeros(length, feat_dim))
        self.register_buffer("label_bank", torch.zeros(length, dtype=torch.int64))
        self.register_buffer("centroids", torch.zeros(num_classes, feat_dim))

    def sizes(self) -> Tensor:
        """Samples per cluster, ``[num_classes]``."""
        return torch.bincount(self.label_bank, minlength=self.num_classes)

    def init_memory(self, feature: Tensor, label: Tensor) -> None:
        """Take the features ``[length, feat_dim]`` and labels ``[length]`` of all samples."""
        self.feature_bank.copy_(F.normalize(feature))
        self.label_bank.copy_(label)
        self.update_centroids_memory()

    @torch.no_grad()
    def update_samples_memory(self, idx: Tensor, feature: Tensor) -> Tensor:
        """Average new features ``[n, feat_dim]`` of the samples ``idx`` ``[n]`` into the memory; update their clusters.

        Every rank calls it with its own samples; the model calls it after its loss has read the labels.

        Returns:
            The change ratio, shape ``[]``: the fraction of these samples, over all ranks, whose label has changed.
        """
        idx, feature = _of_all_ranks(idx), _of_all_ranks(F.normalize(feature.float()))
        mixed = F.normalize(self.feature_bank[idx].lerp(feature, self.momentum))
        self.feature_bank[idx] = mixed
        labels = self._assign(mixed, self.centroids)
        ratio = (labels != self.label_bank[idx]).float().mean()
        self.label_bank[idx] = labels
        return ratio

    def update_centroids_memory(self) -> None:
        """Set every centroid to the mean of its members; an empty cluster keeps its centroid."""
        found = means(self.feature_bank, self.label_bank, self.num_classes)
        self.centroids.copy_(torch.where(self.sizes()[:, None] > 0, found, self.centroids))

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
        sizes = self.sizes()
        small, others = (sizes < self.min_cluster).nonzero().flatten(), (sizes >= self.min_cluster).nonzero().flatten()
        members = torch.isin(self.label_bank, small)
        self.label_bank[members] = others[self._assign(self.feature_bank[members], self.centroids[others])]
        for cluster in small.tolist():
            largest = int(self.sizes().argmax())
            members = (self.label_bank == largest).nonzero().flatten()
            halves, centroids = kmeans(self.feature_bank[members], 2, torch.Generator().manual_seed(0), max_iters=20)
            self.label_bank[members[halves == 1]] = cluster
            self.centroids[largest], self.centroids[cluster] = centroids

    def _assign(self, features: Tensor, centroids: Tensor) -> Tensor:
        if self.assign_by == "distance":
            return torch.cdist(features, centroids).argmin(1)
        return (features @ centroids.T).argmax(1)


def _of_all_ranks(tensor: Tensor) -> Tensor:
    """``[n, ...]`` of each rank, concatenated to ``[world size * n, ...]``."""
    if comm.get_world_size() == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(comm.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)
