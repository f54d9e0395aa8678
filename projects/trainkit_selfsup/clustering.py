"""k-means, and features and samples for it."""

import torch
from torch import Tensor
from torch.nn import functional as F


def kmeans(
    features: Tensor, num_clusters: int, generator: torch.Generator, *, max_iters: int = 50
) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm from the seeds of k-means++ (Arthur & Vassilvitskii, 2007); no cluster is empty.

    ``features`` are ``[N, D]``, floating point; the numbers of the CPU ``generator`` determine the result. The
    algorithm ends after ``max_iters``, even if labels still change. Returns labels, int64 ``[N]``, and centroids
    ``[num_clusters, D]``, the means of their members.
    """
    if not 1 <= num_clusters <= len(features):
        raise ValueError(
            f"num_clusters must be 1 to the {len(features)} samples, got {num_clusters}"
        )
    centroids = _seeds(features, num_clusters, generator)
    labels = torch.full([len(features)], -1, device=features.device)
    for _ in range(max_iters):
        distances, nearest = torch.cdist(features, centroids).min(1)
        nearest = _without_empty(nearest, distances, num_clusters)
        if torch.equal(nearest, labels):
            break
        labels, centroids = nearest, means(features, nearest, num_clusters)
    return labels, centroids


def means(features: Tensor, labels: Tensor, num_clusters: int) -> Tensor:
    """The mean of each cluster's members, ``[num_clusters, D]``; zero for an empty cluster."""
    members = F.one_hot(labels, num_clusters).to(
        features.dtype
    )  # a product adds in a fixed order, also on a GPU
    return members.T @ features / members.sum(0).clamp(min=1)[:, None]


def _seeds(features: Tensor, num_clusters: int, generator: torch.Generator) -> Tensor:
    """Samples drawn one by one; the probability is larger for a larger squared distance to the samples drawn before."""
    weights = torch.ones(len(features), device=features.device)
    squares = torch.full_like(weights, torch.inf)
    seeds: list[Tensor] = []
    for _ in range(num_clusters):
        seeds.append(features[torch.multinomial(weights.cpu(), 1, generator=generator)])
        squares = torch.minimum(squares, (features - seeds[-1]).square().sum(1))
        # if all samples are equal to seeds, take any
        weights = squares if squares.any() else torch.ones_like(squares)
    return torch.cat(seeds)


def _without_empty(labels: Tensor, distances: Tensor, num_clusters: int) -> Tensor:
    """Give each empty cluster the sample that is farthest from its centroid, out of clusters with several samples."""
    sizes = torch.bincount(labels, minlength=num_clusters)
    for empty in (sizes == 0).nonzero().flatten().tolist():
        taken = torch.where(sizes[labels] > 1, distances, -1).argmax()
        sizes[labels[taken]] -= 1
        sizes[empty] += 1
        labels[taken], distances[taken] = empty, 0
    return labels


def whiten(features: Tensor, dim: int) -> Tensor:
    """The ``dim`` principal components of ``[N, D]``, each with variance 1, in rows of length 1; float64 ``[N, dim]``.

    Directions without variance give zeros.
    """
    centered = (features - features.mean(0)).double()
    variances, directions = torch.linalg.eigh(
        centered.T @ centered / len(centered)
    )  # in ascending order
    scales = (variances[-dim:] + 1e-5 * variances[-1]).rsqrt()
    return F.normalize(centered @ directions[:, -dim:] * scales)


def uniform_indices(labels: Tensor, generator: torch.Generator) -> Tensor:
    """``N`` indices for labels ``[N]``; each cluster that is not empty has the same number of indices, give or take 1.

    If a cluster has enough samples, each sample is drawn at most once; from a smaller one, with replacement.
    """
    clusters = labels.unique()
    sizes = torch.full([len(clusters)], len(labels) // len(clusters))
    sizes[: len(labels) % len(clusters)] += 1
    drawn = []
    for cluster, size in zip(clusters, sizes.tolist(), strict=True):
        members = (labels == cluster).nonzero().flatten()
        if len(members) >= size:
            places = torch.randperm(len(members), generator=generator)[:size]
        else:
            places = torch.randint(len(members), [size], generator=generator)
        drawn.append(members[places])
    return torch.cat(drawn).sort().values
